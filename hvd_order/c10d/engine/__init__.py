"""The engine of a process, the models registered with it, and its measurements."""
