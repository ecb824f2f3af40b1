"""The demo: a small GPT on two workers, plain DDP and hvd_order side by side."""
