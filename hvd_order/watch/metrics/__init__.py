"""Metrics for Prometheus: what they are, and where a rank offers them."""
