"""A step in virtual time: computation, transfers and their overlap."""
