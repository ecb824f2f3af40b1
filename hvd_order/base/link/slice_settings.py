"""Slice size, credit and policy, and their best values for a link.

An all-reduce of n bytes takes ``alpha + n beta`` (link_model.py). Two costs pull in opposite
directions. Each slice costs ``alpha``, so B bytes in slices of s cost ``alpha B / s`` beside the
bytes. And an urgent gradient, whose own slice is small (SliceLayout), waits for the slices in
flight: ``beta k s`` with k slices in flight. The sum is least at ``s = sqrt(alpha B / (beta k))``.
Alpha is the cost of a slice on the link, or the latency if that is larger: during training a slice
costs processor time as well.

Workers that push the same slice to one server at the same time set another limit (TCP incast). What
they send at once waits in the queue of the server's port at the switch; what does not fit is lost
and is sent again after a timeout.

Source:
    Alizadeh et al., "Data Center TCP (DCTCP)", SIGCOMM 2010, for incast in shallow queues of
    switches. The limit is measured: docs/decisions/order-on-servers.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from hvd_order.base.link.link_model import LinkModel

__all__ = [
    "AgreementName",
    "PolicyName",
    "SliceSettings",
    "arrival_settings",
    "best_settings",
    "bucket_settings",
    "reservation_lead_s",
    "rounded_settings",
]

_SMALLEST_BYTES = 64 * 1024
_LARGEST_BYTES = 16 * 2**20
_STEP_BYTES = 16 * 1024  # slice sizes are multiples of this
_MOST_IN_FLIGHT = 16
_BURST_BYTES = 512 * 1024  # that workers may send to one server at once
_LEAST_IN_FLIGHT_OF_BURSTS = 4
_FUSED_BYTES = 25 * 2**20  # at most, DDP's default bucket
_FUSED_PARTS = 8  # at least: with one part a small model would not overlap with backward
_SLICE_FACTOR, _CREDIT_FACTOR = 1.4, 1.6  # closer settings count as the same

PolicyName = Literal["priority", "arrival", "planned"]
AgreementName = Literal["leader", "negotiated", "planned"]


@dataclass(frozen=True)
class SliceSettings:
    """How the gradients of a step travel.

    Attributes:
        slice_bytes: unit of transfer.
        credit_bytes: bytes that may be in flight at once.
        policy: rule that picks the next ready slice; "planned" follows a list of slices.
        agreement: how all ranks come to the same order. Under "planned" they follow the order in
            which ``policy`` would have sent the slices of an observed step.
        cross_iteration: whether the next step begins before all gradients have arrived.
        small_front: whether the gradients that are read first travel in smaller slices; otherwise
            slices are filled in the order in which gradients are produced (slice_layout.h).
        split: whether all-reduces are split into reduce-scatters and all-gathers, so that the norms
            of the sums are known before the sums have arrived.
        coded: whether the gradients that were chosen for it travel in fewer bits; only if split.
    """

    slice_bytes: int
    credit_bytes: int
    policy: PolicyName = "priority"
    agreement: AgreementName = "leader"
    cross_iteration: bool = True
    small_front: bool = True
    split: bool = False
    coded: bool = False

    def scaled(self, factor: float) -> SliceSettings:
        """Returns a copy with slices and credit so many times as large."""
        in_flight = self.credit_bytes // self.slice_bytes
        size = rounded_settings(min(factor * self.slice_bytes, _LARGEST_BYTES), 1).slice_bytes
        return replace(self, slice_bytes=size, credit_bytes=in_flight * size)

    def with_settings(
        self,
        slice_bytes: int | None,
        credit_bytes: int | None,
        policy: PolicyName,
    ) -> SliceSettings:
        """Returns a copy with the settings that the user has given."""
        settings = self
        if slice_bytes is not None:
            in_flight = settings.credit_bytes // settings.slice_bytes
            settings = replace(
                settings, slice_bytes=slice_bytes, credit_bytes=in_flight * slice_bytes
            )
        if credit_bytes is not None:
            slice_bytes = min(settings.slice_bytes, credit_bytes)
            settings = replace(settings, slice_bytes=slice_bytes, credit_bytes=credit_bytes)
        return replace(settings, policy=policy)

    def resembles(self, other: SliceSettings) -> bool:
        """Whether the two settings are too similar for trials to distinguish."""
        alike = replace(other, slice_bytes=self.slice_bytes, credit_bytes=self.credit_bytes)
        return (
            self == alike
            and _within(self.slice_bytes, other.slice_bytes, _SLICE_FACTOR)
            and _within(self.credit_bytes, other.credit_bytes, _CREDIT_FACTOR)
        )


def best_settings(
    link: LinkModel, total_bytes: int, in_flight: int = 2, pushers: int = 1
) -> SliceSettings:
    """The settings with the least sum of both costs for ``total_bytes`` of gradients.

    Args:
        in_flight: least number of slices that keeps the transport busy.
        pushers: workers that push the same slice to a server at the same time. Slices are then
            small enough for the server's port at the switch, but not so small that a slice costs
            more than its bytes.
    """
    # Messages and wake-ups take processor time, which an idle transport does not show.
    alpha_s = max(link.slice_cost_s, link.latency_s)
    size = math.sqrt(alpha_s * total_bytes / (link.seconds_per_byte * in_flight))
    burst = max(_BURST_BYTES / pushers, link.slice_cost_s / link.seconds_per_byte)
    if pushers > 1 and size > burst:
        # Such slices pass in little more than the time of an agreement on the next ones.
        size, in_flight = burst, max(in_flight, _LEAST_IN_FLIGHT_OF_BURSTS)
    size = min(max(size, _SMALLEST_BYTES), _LARGEST_BYTES)
    slice_bytes = rounded_settings(size, 1).slice_bytes
    # Two slices do not fill a link of high latency: others must travel during an acknowledgment.
    slice_s = slice_bytes * link.seconds_per_byte
    in_flight = min(max(in_flight, 1 + math.ceil(link.latency_s / slice_s)), _MOST_IN_FLIGHT)
    return SliceSettings(slice_bytes, in_flight * slice_bytes)


def rounded_settings(
    slice_bytes: float, in_flight: int, policy: PolicyName = "priority"
) -> SliceSettings:
    """Rounds the slice size and sets the credit to ``in_flight`` slices."""
    size = max(round(slice_bytes / _STEP_BYTES), 1) * _STEP_BYTES
    return SliceSettings(size, in_flight * size, policy)


def reservation_lead_s(link: LinkModel, settings: SliceSettings) -> float:
    """Seconds before the most urgent gradient by which the last large slice should begin.

    The slices in flight then need this long to arrive. The window is full or half full, so it holds
    three quarters of the credit on average. A link that falls idle early costs as much as a
    gradient that waits equally long. With split all-reduces a reservation gains nothing
    (docs/decisions/link-reservation.md).
    """
    return (
        0.0
        if settings.policy == "arrival" or settings.agreement == "planned" or settings.split
        else 0.75 * settings.credit_bytes * link.seconds_per_byte
    )


def arrival_settings(total_bytes: int) -> SliceSettings:
    """Large slices of neighbouring gradients, sent in order of arrival."""
    size = min(max(total_bytes / _FUSED_PARTS, _SMALLEST_BYTES), _FUSED_BYTES)
    return rounded_settings(size, 2, "arrival")


def bucket_settings(total_bytes: int, few: bool) -> SliceSettings:
    """DistributedDataParallel's method: buckets in a fixed order, all awaited in ``step()``.

    Nothing is decided on the way, so it costs what DistributedDataParallel costs.

    Args:
        total_bytes: total size of all gradients.
        few: buckets of 25 MiB; a smaller model is one bucket, so nothing competes with the
            backward pass. Otherwise an eighth of the model each, 25 MiB at most, and smaller at the
            front, so that little is left to transfer when the backward pass ends.
    """
    size = float(_FUSED_BYTES)
    if not few:
        size = min(max(total_bytes / _FUSED_PARTS, _SMALLEST_BYTES), _FUSED_BYTES)
    in_flight = math.ceil(total_bytes / size) + 1  # credit for all: DDP has no limit
    settings = rounded_settings(size, in_flight, "arrival")
    return replace(settings, agreement="planned", cross_iteration=False, small_front=not few)


def _within(one: int, other: int, factor: float) -> bool:
    return max(one, other) <= factor * min(one, other)
