"""Runs the user's optimizer on some of its parameters, where this gives the same result."""
