"""Backends for TensorFlow, torch.distributed and MPI, and the library of operators."""
