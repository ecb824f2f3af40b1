"""Gradient exchange over parameter servers instead of all-reduce.

docs/guides/parameter-server.md has an overview.

`process` is the program of a server, `coordinator` has worker 0's decisions.
"""

from hvd_order._native.requirements import require_extension, require_torch

__all__: list[str] = []

# Must precede any import of the engine, which needs PyTorch's libraries.
require_torch()
require_extension()
