"""``hvd-order doctor``: report of builds and transports, and a test of two ranks.

Include its output in bug reports. Code that may crash runs in a separate process.
"""
