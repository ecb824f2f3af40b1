"""Measures what the transport of gradients can do, once for each engine."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import quantiles

import torch

from hvd_order import _torch as native
from hvd_order.plan.cut import Link

__all__: list[str] = []

_ROUNDS = 5
_TINY_BYTES = 1024
_SMALL = (16, 128 * 1024)  # slices, bytes of each
_LARGE = (4, 2**20)


def measure(transport: native.TorchTransport, device: torch.device, in_flight: int) -> Link:
    """Times some all-reduces of up to 4 MiB, several times each. Collective.

    Args:
        transport: that of the gradients, which must be idle.
        device: where the gradients are.
        in_flight: slices under way at a time.

    Raises:
        HorovodInternalError: a transfer failed.
    """
    buffer = torch.zeros(_LARGE[0] * _LARGE[1] // 4, device=device)
    tiny = buffer[: _TINY_BYTES // 4]
    latency_s = _undisturbed(transport.time_stream([tiny], 1) for _ in range(4 * _ROUNDS))
    times = []
    for count, size_bytes in (_SMALL, _LARGE):
        slices = list(buffer[: count * size_bytes // 4].split(size_bytes // 4))
        took = _undisturbed(transport.time_stream(slices, in_flight) for _ in range(_ROUNDS))
        times.append((count, size_bytes, took))
    return Link.from_streams(latency_s, *times)


def _undisturbed(seconds: Iterable[float]) -> float:
    """The lower quartile: what else a machine has to do only adds."""
    return quantiles(seconds, n=4)[0]
