"""Gradients of one model through a step, and updates that wait for them."""
