"""Choice of the number of servers of a job."""
