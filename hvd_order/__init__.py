"""Ordered, preemptible communication for data-parallel training.

The names here need no framework; ``import hvd_order.torch as hvd`` is the drop-in for PyTorch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

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

run: Callable[..., list[Any]]  # of hvd_order.launch.function, which ranks seldom need

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
    "run",
]


def __getattr__(name: str) -> Any:
    if name != "run":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("hvd_order.launch.function").run
