"""Sharded optimizer state: each rank updates its shards of all slices."""
