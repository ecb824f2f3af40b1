"""Single collectives: requests, their order by name, and ``join()``."""
