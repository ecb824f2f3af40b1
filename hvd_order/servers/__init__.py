"""Parameter servers without a framework: access control, and the assignment of slices."""
