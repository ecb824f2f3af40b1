"""Workers of a job on one or several hosts: their start, formations and end."""
