"""``hvd-order check``: finds mistakes of distributed training in the text of scripts.

The check runs and imports nothing. A rule reports a mistake only if it occurs on every path
through the text.
"""
