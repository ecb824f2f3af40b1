"""Heuristics for the order of transfers and for the messages that carry them."""
