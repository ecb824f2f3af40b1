"""Sub-commands of ``hvd-order cluster``."""
