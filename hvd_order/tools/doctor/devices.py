"""What the doctor says of GPUs: one line each for devices and kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["cuda_line", "kernels_line", "version_of"]


def version_of(number: int) -> str:
    """CUDA's version from its number: 12040 is 12.4."""
    return f"{number // 1000}.{number % 1000 // 10}"


def cuda_line(torch: Mapping[str, Any], driver: int | None) -> str:
    """Which devices can be used, or why none can.

    Args:
        torch: facts about PyTorch (torch_facts.py).
        driver: the newest CUDA that the driver supports (12040 is 12.4); None without a driver.
    """
    if not torch["works"]:
        return "no PyTorch"
    if torch["devices"]:
        return ", ".join(torch["devices"])
    if torch["rocm"]:
        return f"none: ROCm {torch['rocm']} sees no device"
    built_for, version = torch["cuda"], torch["version"]
    if built_for is None and driver is None:
        return f"none: PyTorch {version} is built for the CPU, and there is no NVIDIA driver"
    if built_for is None:
        assert driver is not None
        return (
            f"none: PyTorch {version} is built for the CPU, the driver supports CUDA "
            f"{version_of(driver)}; install a PyTorch for CUDA"
        )
    if driver is None:
        return f"none: PyTorch is built for CUDA {built_for}, but there is no NVIDIA driver"
    if driver // 1000 < int(built_for.split(".")[0]):
        return (
            f"none: the driver supports CUDA {version_of(driver)}, PyTorch is built for "
            f"{built_for}; update the driver, or install a PyTorch for CUDA {driver // 1000}"
        )
    return "none: PyTorch and driver fit, but no device is visible (CUDA_VISIBLE_DEVICES?)"


def kernels_line(torch: Mapping[str, Any], kernels: Mapping[str, Any]) -> str:
    """Whether hvd_order's kernels run, or why PyTorch's operators take their place.

    Args:
        kernels: ``compiled_for`` and ``why_not`` of `hvd_order.torch.kernels.Kernels`.
    """
    compiled = f"compiled for {kernels['compiled_for']}" if kernels["compiled_for"] else ""
    if torch["works"] and torch["cuda"] is None:
        return f"not needed: PyTorch is not built for CUDA{compiled and f' ({compiled})'}"
    if kernels["why_not"]:
        return f"not used: {kernels['why_not']}"
    return compiled
