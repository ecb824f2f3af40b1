"""Prices of machines by load, and the cheapest schedule of a job at these prices."""
