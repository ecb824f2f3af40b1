"""Sub-commands about plans and predictions."""
