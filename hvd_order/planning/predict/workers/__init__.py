"""Throughput of many workers with parameter servers or all-reduce, from the profile of one."""
