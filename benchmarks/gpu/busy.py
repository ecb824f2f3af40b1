"""The device of a rank, and keeping it busy for a known time."""

from __future__ import annotations

import functools
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_CYCLES = 20_000_000


def open_device(kind: str, backend: str = "") -> torch.device:
    """The device of this rank.

    Args:
        kind: "cuda"; "cpu" and "test" (tests/device) try the checks where there is no GPU.
        backend: what carries CUDA tensors, where hvd_order would choose another.
    """
    if kind == "test":
        device = test_device()
        from hvd_order._native import _torch as native

        native.register_kernels(device.type, test_extension().kernels())
        if os.environ.get("WORLD_SIZE", "1") != "1":
            dist.init_process_group(f"cpu:gloo,{device.type}:{device.type}")
        return device
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device(
        "cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    )
    torch.cuda.set_device(device)
    if backend:
        if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > torch.cuda.device_count():
            share_gpu()
        dist.init_process_group(f"cpu:gloo,cuda:{backend}")
    return device


def share_gpu() -> None:
    """Lets NCCL take several ranks on one GPU: they pass as hosts, with sockets between them."""
    os.environ["NCCL_HOSTID"] = f"rank {os.environ['RANK']}"
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"  # NCCL 2.30 looks at the GPU as well


@functools.cache
def test_extension() -> Any:
    """The module of the test device, built if need be."""
    sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
    from helpers.device.test_device import load

    return load()


def test_device() -> torch.device:
    """The test device."""
    test_extension()
    from helpers.device.test_device import NAME

    return torch.device(NAME, 0)


class Busy:
    """Enqueues idle kernels of a given length on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type != "cuda":
            return
        times = []
        for _ in range(3):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            torch.cuda._sleep(_CYCLES)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        self._cycles_per_s = _CYCLES / min(times)

    def enqueue(self, seconds: float) -> None:
        """On the CPU, where nothing is enqueued, it sleeps."""
        if self._device.type == "cpu":
            time.sleep(seconds)
        elif self._device.type == "cuda":
            torch.cuda._sleep(int(seconds * self._cycles_per_s))
        else:
            test_extension().busy(seconds)
