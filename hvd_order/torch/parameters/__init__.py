"""Parameters: their entries, and the detection of their first readers."""
