"""Policies: which job gets what, and when. None knows the simulator."""
