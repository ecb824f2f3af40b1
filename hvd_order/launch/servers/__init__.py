"""Parameter servers of a job, started beside its workers."""
