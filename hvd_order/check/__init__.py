"""``hvd-order check``: finds mistakes of distributed training in the text of scripts.

Nothing is run or imported. Rules prefer silence to doubt: what is reported is wrong on
every path that the text shows.
"""
