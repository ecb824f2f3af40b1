"""A step in virtual time: computation, transfers, and how well they overlap."""
