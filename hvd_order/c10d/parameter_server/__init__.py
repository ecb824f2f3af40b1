"""Gradient exchange over parameter servers instead of all-reduce.

docs/guides/parameter-server.md has an overview.

`process` is the program of a server, `client` the worker's end, `coordinator` worker 0's
decisions.
"""
