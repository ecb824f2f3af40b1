"""Accelerators of any type."""

from __future__ import annotations

import torch

__all__: list[str] = []


def synchronize(device: torch.device) -> None:
    """Waits until all work of a device has run."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
