"""How many servers a job should have."""
