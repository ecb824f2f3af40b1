"""What setup.py builds with and for: PyTorch, TensorFlow, nvcc, cmake. Imports none of them."""
