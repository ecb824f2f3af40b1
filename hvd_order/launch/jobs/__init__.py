"""Workers of a job on one or several hosts: their start, rounds and end."""
