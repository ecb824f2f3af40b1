"""Kernels for CUDA: made known to native code where they can run."""

from __future__ import annotations

import functools
import importlib
import logging
from dataclasses import dataclass

import torch

from hvd_order._native import _torch as native
from hvd_order.base.errors import InvalidUsage

__all__ = ["Kernels", "kernels_for", "use_kernels"]

_log = logging.getLogger("hvd_order")


@dataclass(frozen=True)
class Kernels:
    """The kernels that pack gradients and unpack sums on one type of device.

    Attributes:
        why_not: why PyTorch's operators take their place, in words; empty if they do not.
        compiled_for: the architectures, in words; empty if there are no kernels.
    """

    why_not: str
    compiled_for: str = ""


def use_kernels(device_type: str) -> None:
    """Uses the kernels of a type of device, once; says in the log if there are none."""
    if device_type == "cuda" and kernels_for(device_type).why_not:
        _log_reason(kernels_for(device_type).why_not)


@functools.cache
def _log_reason(why: str) -> None:
    _log.info("gradients are packed by PyTorch's operators, one launch each: %s", why)


@functools.cache
def kernels_for(device_type: str) -> Kernels:
    """Makes the kernels of a type of device known to native code."""
    if device_type != "cuda":
        return Kernels(f"hvd_order has kernels for CUDA only, not for {device_type}")
    if torch.version.hip is not None:
        return Kernels("hvd_order has kernels for CUDA only, not for ROCm")
    try:
        cuda = importlib.import_module("hvd_order._native._cuda")
    except ModuleNotFoundError:
        return Kernels(
            "hvd_order was built where nvcc was not found; install the CUDA toolkit, 12.1 or "
            "newer (pip install -r requirements/cuda.txt), and build again"
        )
    except ImportError as error:
        return Kernels(f"hvd_order's kernels cannot be loaded: {error}")
    runtime, driver, failure = cuda.state()
    if driver and driver // 1000 < runtime // 1000:
        return Kernels(
            f"the driver supports CUDA {_version(driver)}, hvd_order's kernels were compiled with "
            f"{_version(runtime)}; update the driver, or build with an older nvcc",
            cuda.ARCHITECTURES,
        )
    if failure:
        return Kernels(f"CUDA says: {failure}", cuda.ARCHITECTURES)
    try:
        native.register_kernels("cuda", cuda.kernels())
    except InvalidUsage as unfit:
        return Kernels(str(unfit), cuda.ARCHITECTURES)
    return Kernels("", cuda.ARCHITECTURES)


def _version(number: int) -> str:
    """12040 is 12.4."""
    return f"{number // 1000}.{number % 1000 // 10}"
