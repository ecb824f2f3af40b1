"""Keeping a device busy for a known time, so that what is enqueued behind it runs late."""

from __future__ import annotations

import time

import torch

_CYCLES = 20_000_000


class Busy:
    """Enqueues idle kernels of a given length on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cpu":
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
        else:
            torch.cuda._sleep(int(seconds * self._cycles_per_s))
