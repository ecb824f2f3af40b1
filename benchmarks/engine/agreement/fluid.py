"""The fastest a synchronous step can be: a fluid link that always serves what is needed first.

No method that moves the same bytes at the same rate can end earlier on a chain of layers, because
the link is never idle while anything is ready, and nothing ever waits behind something less
urgent. Real slices cannot be interrupted and cost latency; that is the distance measured here.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """A module that owns parameters, in consumption order.

    Attributes:
        tensors: its gradients, as places in consumption order.
        forward_s, backward_s: duration of its compute, in seconds.
    """

    tensors: tuple[int, ...]
    forward_s: float
    backward_s: float


class FluidLink:
    """Carries one transfer at a time, the most urgent of those ready, and may switch any time."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._now = 0.0
        self._arrivals: list[tuple[float, int, float]] = []  # heap of (time, tensor, bytes)
        self._ready: list[int] = []  # heap
        self._left: dict[int, float] = {}  # bytes
        self._done: dict[int, float] = {}  # tensor to time

    def offer(self, time_s: float, tensor: int, size_bytes: float) -> None:
        """From ``time_s`` on, which is not in the past, the tensor can travel."""
        self._done.pop(tensor, None)
        heapq.heappush(self._arrivals, (time_s, tensor, size_bytes))

    def arrival(self, tensor: int) -> float:
        """When an offered tensor is through."""
        while tensor not in self._done:
            self._serve()
        return self._done[tensor]

    def _serve(self) -> None:
        """Goes on to the next event: something becomes ready, or something is through."""
        while self._arrivals and self._arrivals[0][0] <= self._now:
            _, tensor, size_bytes = heapq.heappop(self._arrivals)
            heapq.heappush(self._ready, tensor)
            self._left[tensor] = size_bytes
        coming = self._arrivals[0][0] if self._arrivals else math.inf
        if not self._ready:
            self._now = coming
            return
        tensor = self._ready[0]
        end = self._now + self._left[tensor] / self._rate
        if end <= coming:
            heapq.heappop(self._ready)
            self._now = self._done[tensor] = end
        else:
            self._left[tensor] -= (coming - self._now) * self._rate
            self._now = coming


def fluid_s(
    stages: Sequence[Stage],
    sizes_bytes: Sequence[int],
    bytes_per_s: float,
    steps: int,
    delay_s: Callable[[int, int], float],
) -> float:
    """How long ``steps`` steps take, from the first forward until the last gradient is summed.

    Args:
        stages: in consumption order.
        sizes_bytes: of each tensor.
        bytes_per_s: of a saturated all-reduce.
        steps: how many.
        delay_s: of (step, tensor): how long after its backward the slowest rank has the gradient.
    """
    link = FluidLink(bytes_per_s)
    now = 0.0
    for step in range(steps):
        for stage in stages:
            if step > 0:
                now = max([now, *(link.arrival(tensor) for tensor in stage.tensors)])
            now += stage.forward_s
        for stage in reversed(stages):
            now += stage.backward_s
            for tensor in stage.tensors:
                link.offer(now + delay_s(step, tensor), tensor, sizes_bytes[tensor])
    return max([now, *(link.arrival(tensor) for tensor in range(len(sizes_bytes)))])
