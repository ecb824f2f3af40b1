"""Collectives for TensorFlow, eagerly and in graphs."""
