"""What carries gradients and collectives between processes by torch.distributed.

PyTorch's and TensorFlow's sides are built on it. It knows no model and no optimizer.
"""
