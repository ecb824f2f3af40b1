"""What carries bytes for TensorFlow: torch.distributed or MPI, and the library of operators."""
