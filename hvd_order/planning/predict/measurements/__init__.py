"""Measurements of others: read from their files, and fitted."""
