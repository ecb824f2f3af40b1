"""The account of steps in the loggers of trainers: a module for each library, which imports it.

Lightning's is in `hvd_order.lightning`.
"""
