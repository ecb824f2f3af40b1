"""The engine of a process, what is registered with it, and what it measures."""
