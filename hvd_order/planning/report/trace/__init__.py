"""The report about a timeline of all ranks: what was exposed, why, and what would help."""
