"""Profiles, plans and traces on disk."""
