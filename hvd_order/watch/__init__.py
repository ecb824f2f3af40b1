"""Shows the account of steps outside the job: metrics, callbacks of trainers, ``hvd-order top``."""
