"""Dependency graph of a step, and priorities of its transfers."""
