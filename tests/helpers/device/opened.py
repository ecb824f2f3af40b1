"""The device of a rank of a check, what keeps it busy, and an engine on it without a job."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from helpers.device import test_device

from hvd_order._native import _torch as native
from hvd_order.torch.kernels import kernels_for

_CYCLES = 20_000_000
_CREDIT_BYTES = 8 * 2**20


def open_device(kind: str, backend: str = "") -> torch.device:
    """The device of this rank.

    Args:
        kind: "cuda", "test" (tests/device) or "cpu".
        backend: what carries CUDA tensors, where hvd_order would choose another.
    """
    if kind == "test":
        native.register_kernels(test_device.NAME, test_device.load().kernels())
        if os.environ.get("WORLD_SIZE", "1") != "1":
            dist.init_process_group(f"cpu:gloo,{test_device.NAME}:{test_device.NAME}")
        return torch.device(test_device.NAME, 0)
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
            test_device.load().busy(seconds)


def require_kernels(device: torch.device) -> None:
    """On a GPU operators of PyTorch would answer in their place."""
    if device.type == "cuda":
        assert not (why_not := kernels_for("cuda").why_not), f"there are no kernels: {why_not}"


def engine_alone(
    device: torch.device, planned: bool = False
) -> tuple[native.Engine, native.C10dTransport]:
    """An engine of one rank on a process group of its own."""
    if not dist.is_initialized():
        backend = {"cuda": "nccl", "cpu": "gloo"}.get(device.type, device.type)
        bound = {"device_id": device} if device.type == "cuda" else {}
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **bound)
    transport = native.C10dTransport(dist.group.WORLD)
    engine = native.Engine(
        rank=0,
        size=1,
        agreement=native.AgreementKind.PLANNED if planned else native.AgreementKind.LEADER,
        policy=native.Policy.PLANNED if planned else native.Policy.PRIORITY,
        credit_bytes=_CREDIT_BYTES,
        timeout_s=60,
        stall_warning_s=30,
        transport=transport,
        control=None,
    )
    return engine, transport
