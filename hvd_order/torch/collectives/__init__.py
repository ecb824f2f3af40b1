"""Collectives on PyTorch tensors, with Horovod's names and meaning."""
