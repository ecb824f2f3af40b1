"""Gradients and collectives between processes over torch.distributed.

The PyTorch and TensorFlow frontends build on this package. It has no knowledge of models or
optimizers.
"""

from hvd_order._native.requirements import require_extension, require_torch

__all__: list[str] = []

# Must precede any import of hvd_order._native._torch, which needs PyTorch's libraries.
require_torch()
require_extension()
