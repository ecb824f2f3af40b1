"""Slice size and credit derived from a measurement of the transport, the same on all ranks."""

from __future__ import annotations

from dataclasses import replace

import torch

from hvd_order.base.link.slice_settings import SliceSettings, best_settings
from hvd_order.engine.half_forms import choose_half_forms
from hvd_order.engine.model_channel import ModelChannel

__all__: list[str] = []


def advised_settings(
    channel: ModelChannel,
    device: torch.device,
    size_bytes: int,
    again: bool = False,
    split: bool = False,
) -> SliceSettings:
    """Returns the link model's slice settings, overridden by the user's. Collective.

    Nothing may be in flight. The caller has the engine's turn.

    Args:
        channel: of the model.
        device: device of the gradients.
        size_bytes: size of all gradients.
        again: measure even if the link was measured before.
        split: all-reduces may be split; they are if all ranks say so.

    Raises:
        HorovodInternalError: a rank is gone or does not take part.
    """
    host = channel.host
    config = host.job.config
    link = host.known_link
    if link is None or again:
        with channel.common_step("the measurement of the network"):
            link = host.measure_link(
                device, lambda seconds: max(channel.gather("the speed of the network", seconds))
            )
    settings = best_settings(link, size_bytes, host.choice.in_flight, host.choice.pushers)
    settings = settings.with_settings(config.slice_bytes, config.credit_bytes, config.policy)
    settings = replace(
        settings, agreement=host.first_agreement, cross_iteration=config.cross_iteration
    )
    # Ranks may have measured different links; all of them use rank 0's result.
    of_ranks: list[tuple[SliceSettings, bool, float]] = channel.gather(
        "slice settings", (settings, split, link.seconds_per_byte)
    )
    # Measured also for models that may be registered later, when transfers can be in flight.
    can_split = config.split != "never" and choose_half_forms(
        channel, device, max(per_byte for _, _, per_byte in of_ranks)
    )
    return replace(of_ranks[0][0], split=can_split and all(each for _, each, _ in of_ranks))
