"""Heuristics: the order of transfers, and what travels together."""
