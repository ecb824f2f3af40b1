"""Time that work takes on a device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from benchmarks.runner.ranks import finish


def device_seconds(work: Callable[[], None], device: torch.device) -> float:
    """Seconds between two events around ``work``; on devices without timed events, of the host."""
    finish(device)
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
    started = time.perf_counter()
    work()
    finish(device)
    return time.perf_counter() - started
