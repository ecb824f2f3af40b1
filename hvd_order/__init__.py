"""Ordered, preemptible communication for data-parallel training.

The names here need no framework; ``import hvd_order.torch as hvd`` is the drop-in for PyTorch.
"""

from hvd_order._native import torch_engines
from hvd_order.base.errors import (
    BrokenInvariant,
    HorovodInternalError,
    HvdOrderError,
    InvalidUsage,
    ModelMismatch,
    NotInitialized,
    PeerLost,
    StaleRead,
    TransferTimeout,
)

__version__ = "0.1.0"

torch_engines.install()

__all__ = [
    "BrokenInvariant",
    "HorovodInternalError",
    "HvdOrderError",
    "InvalidUsage",
    "ModelMismatch",
    "NotInitialized",
    "PeerLost",
    "StaleRead",
    "TransferTimeout",
    "__version__",
]
