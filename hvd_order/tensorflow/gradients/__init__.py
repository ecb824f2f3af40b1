"""Gradients of a list of variables during a step."""
