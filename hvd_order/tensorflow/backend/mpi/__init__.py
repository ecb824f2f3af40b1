"""The backend over MPI, through mpi4py: for TensorFlow without PyTorch (see backend.py)."""
