"""Slice size and credit from a measurement of the transport, the same on all ranks."""

from __future__ import annotations

import torch

from hvd_order.c10d.engine import registration
from hvd_order.c10d.engine.engine_host import EngineHost
from hvd_order.plan.link.cut import Cut, best_cut

__all__: list[str] = []


def advised_cut(
    host: EngineHost, device: torch.device, size_bytes: int, again: bool = False
) -> Cut:
    """What the model of the transport advises, with what the user has set. Collective.

    Nothing may be in flight.

    Args:
        device: where the gradients are.
        size_bytes: of all gradients.
        again: measure though it was done before.

    Raises:
        HorovodInternalError: a rank is gone or does not come.
    """
    config = host.context.config
    with registration.common_step(host, "the measurement of the network"):
        link = host.link(device, again)
    cut = best_cut(link, size_bytes, host.in_flight)
    cut = cut.with_settings(config.slice_bytes, config.credit_bytes, config.policy)
    # Whoever registers first measures first: all ranks take rank 0's word.
    chosen: Cut = registration.gather(host, cut)[0]
    return chosen
