"""Measurement of the transport of gradients, once for each engine."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hvd_order._native import _torch as native
from hvd_order.base.errors import HorovodInternalError
from hvd_order.base.link.link_model import PROBE_BYTES, LinkModel, measured_link

__all__: list[str] = []


def measure(
    transport: native.TorchTransport,
    device: torch.device,
    in_flight: int,
    longest: Callable[[float], float],
) -> LinkModel:
    """Times a few all-reduces (base/link/link_model.py). Collective.

    Args:
        transport: transport of the gradients, which must be idle.
        device: device of the gradients.
        in_flight: number of slices in flight at a time.
        longest: see `measured_link`.

    Raises:
        RuntimeError: a transfer failed; the transport does not know which rank is to blame.
    """
    buffer = torch.zeros(PROBE_BYTES // 4, device=device)

    def time_stream(sizes: list[int]) -> float:
        ends = [sum(sizes[: i + 1]) // 4 for i in range(len(sizes))]
        pieces = [buffer[end - size // 4 : end] for end, size in zip(ends, sizes, strict=True)]
        return transport.time_stream(pieces, min(in_flight, len(pieces)))

    try:
        return measured_link(time_stream, longest)
    except HorovodInternalError as error:
        raise RuntimeError(str(error)) from error
