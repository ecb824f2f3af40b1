"""Runs the user's optimizer on some of its parameters, where that gives the same result."""
