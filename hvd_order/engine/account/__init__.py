"""The account of steps on all ranks: what the ranks tell each other, and whom it is told to."""
