"""The backend for TensorFlow, torch.distributed, and the library of operators."""
