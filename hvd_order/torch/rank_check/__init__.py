"""Whether all ranks train the same parameters with the same settings."""
