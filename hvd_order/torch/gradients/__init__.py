"""Gradients of one model through a step, and the updates that wait for them."""
