"""Collectives on PyTorch's tensors, with Horovod's names and meaning."""
