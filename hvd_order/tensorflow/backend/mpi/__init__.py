"""MPI, through mpi4py, as the carrier: for TensorFlow without PyTorch (carrier.py is the seam)."""
