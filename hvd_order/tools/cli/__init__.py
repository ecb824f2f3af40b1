"""The command ``hvd-order``: parse, call one function, print."""
