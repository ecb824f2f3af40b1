"""MPI, through mpi4py, as the backend: for TensorFlow without PyTorch (backend.py is the seam)."""
