"""What setup.py builds with and for: PyTorch, nvcc, cmake. Imports none of them."""
