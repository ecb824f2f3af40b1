"""Collectives as TensorFlow's users call them, eagerly and in graphs."""
