"""``hvd-order doctor``: what is built, what works here, and a test of two ranks.

The first thing to paste into a bug report. Whatever may crash runs in a process of its own.
"""
