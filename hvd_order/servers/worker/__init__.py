"""A worker's side of parameter servers."""

from hvd_order._native.requirements import require_extension, require_torch

__all__: list[str] = []

# Must precede any import of the engine, which needs PyTorch's libraries.
require_torch()
require_extension()
