"""Gloo's process groups, with as few threads as their traffic needs.

torch.distributed gives every Gloo group a network device of its own, whose event loop is a thread,
and two workers, the threads that run collectives. hvd_order has many groups, so its groups share
devices, and a group has as many workers as it runs collectives at a time. Sends and receives need
no worker: the event loop completes them.

Messages and data have separate devices. On a common one a message would wait while the event loop
moves data (docs/decisions/gloo-threads.md).
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist
from torch._C._distributed_c10d import Store

__all__ = ["GlooDevices", "Traffic", "gloo_group", "open_devices"]

Traffic = Literal["messages", "in turn", "at once"]
"""What a group carries: sends and receives alone, one collective at a time, or several."""

_WORKERS: dict[Traffic, int] = {"messages": 0, "in turn": 1, "at once": 2}  # for each device


class GlooDevices:
    """The network devices that the groups of a job share, opened for the first group.

    A device ends, with its thread, when no group uses it and this object is gone.
    """

    def __init__(self) -> None:
        self._of_messages: list[Any] = []
        self._of_data: list[Any] = []

    def of(self, traffic: Traffic) -> list[Any]:
        """Returns the devices for a kind of traffic; see `open_devices`."""
        devices = self._of_messages if traffic == "messages" else self._of_data
        if not devices:
            devices += open_devices()
        return devices


def open_devices() -> list[Any]:
    """Opens a device for each interface that GLOO_SOCKET_IFNAME names, as torch.distributed does.

    Without the variable the device has the address to which the host's name resolves.

    Raises:
        RuntimeError: an interface does not exist, or this PyTorch's Gloo lacks the kind of device
            that GLOO_DEVICE_TRANSPORT requests.
    """
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if not names:
        return [dist.ProcessGroupGloo.create_default_device()]
    return [dist.ProcessGroupGloo.create_device(interface=name) for name in names.split(",")]


def gloo_group(
    store: Store, rank: int, size: int, timeout: timedelta, traffic: Traffic, devices: list[Any]
) -> Any:
    """Connects a group. Collective among its members.

    Args:
        store: has keys with no other user; the members meet there.
        rank: this process's place in the group.
        size: number of members.
        timeout: longest transfer.
        traffic: what the group carries.
        devices: from `open_devices`; collectives use them in turn.

    Raises:
        RuntimeError: a member did not come, or cannot be reached.
    """
    gloo: Any = dist.ProcessGroupGloo  # torch's type stub lacks the options' real names
    options = gloo._Options()
    options._timeout = timeout
    options._devices = devices
    options._threads = _WORKERS[traffic] * len(devices)
    return gloo(store, rank, size, options)
