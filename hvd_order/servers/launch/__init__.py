"""Parameter servers that a job starts beside its workers."""
