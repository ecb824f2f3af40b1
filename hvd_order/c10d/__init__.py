"""What carries gradients and collectives between processes by torch.distributed.

PyTorch's and TensorFlow's sides are built on it. It knows no model and no optimizer.
"""

from hvd_order.c10d._requirements import require_extension, require_torch

__all__: list[str] = []

# Before any import of hvd_order._torch, which needs PyTorch's libraries.
require_torch()
require_extension()
