"""Gradients over parameter servers instead of all-reduce; docs/parameter-server.md has the picture.

`process` is what a server runs, `client` the worker's end, `coordinator` what worker 0 decides.
"""
