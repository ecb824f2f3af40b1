"""Parameter servers without a framework: who is let in, and who holds which slices."""
