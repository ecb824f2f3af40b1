"""The sums of gradients: how they arrive, and what they are used for."""
