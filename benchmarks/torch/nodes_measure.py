"""What is measured on all ranks at once: steps, the link, communication that nothing hides."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from hvd_order.planning.steps.efficiency import busy_s

Span = tuple[float, float]
_LINK_BYTES = 32 << 20
_LINK_REPEATS = 5
_PROFILED_STEPS = 4


def seconds_a_step(
    step: Callable[[], None], steps: int, device: torch.device,
    flush: Callable[[], None] = lambda: None,
) -> float:  # fmt: skip
    """The slowest rank's step time; ranks, devices and links are idle before and after.

    Args:
        flush: ends what a step leaves in flight; its time counts.
    """
    flush()
    _finish(device)
    dist.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    flush()
    _finish(device)
    return slowest((time.perf_counter() - began) / steps, device)


def slowest(seconds: float, device: torch.device) -> float:
    """The largest of all ranks' times."""
    times = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return times.item()


def on_all_ranks(yes: bool, device: torch.device) -> bool:
    """Whether all ranks say so."""
    return slowest(0.0 if yes else 1.0, device) == 0.0


def link_gbit(device: torch.device) -> float:
    """Rate at which an all-reduce of 32 MiB leaves each rank, in Gbit/s; 0 for one rank.

    A ring sends 2 (n - 1) / n of the bytes; the fastest of five runs counts.
    """
    size = dist.get_world_size()
    data = torch.zeros(_LINK_BYTES // 4, device=device)

    def reduce() -> None:
        dist.all_reduce(data)

    reduce()
    fastest = min(seconds_a_step(reduce, 1, device) for _ in range(_LINK_REPEATS))
    return 2 * (size - 1) / size * _LINK_BYTES * 8 / fastest / 1e9


def exposed_seconds(communication: Iterable[Span], computation: Iterable[Span]) -> float:
    """How long communication goes on while no computation does.

    Args:
        communication, computation: begin and end of each kernel, in seconds.
    """
    computing = list(computation)
    return busy_s([*communication, *computing]) - busy_s(computing)


def profiled_exposed(
    step: Callable[[], None], device: torch.device, flush: Callable[[], None] = lambda: None
) -> float | None:
    """Seconds a step in which this rank's GPU runs NCCL's kernels alone, by PyTorch's profiler.

    None on a CPU, where communication is no work of the device.
    """
    if device.type != "cuda":
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(_PROFILED_STEPS):
            step()
        flush()
        _finish(device)
    communication: list[Span] = []
    computation: list[Span] = []
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spans = communication if "nccl" in event.name.lower() else computation
            spans.append((event.time_range.start / 1e6, event.time_range.end / 1e6))
    return exposed_seconds(communication, computation) / _PROFILED_STEPS


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
