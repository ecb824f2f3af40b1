"""The plan of a job: orders and slice settings that a run follows, and the file that holds them."""
