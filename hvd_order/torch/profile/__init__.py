"""Profiles of a training step, for the planner."""
