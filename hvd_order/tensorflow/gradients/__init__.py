"""Gradients of a list of variables through a step."""
