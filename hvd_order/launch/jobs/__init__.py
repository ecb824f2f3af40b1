"""Workers of a job: started, led through rounds, and ended, on one host or on several."""
