"""What a training step will take. Pure: no framework, no clock, no I/O."""
