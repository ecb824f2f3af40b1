"""Parameters: what is known of each, and who reads it first."""
