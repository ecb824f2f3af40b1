"""Slice size and credit from a latency-bandwidth model of the transport.

The model (Hockney, Parallel Computing 20, 1994): an all-reduce of n bytes takes ``alpha + n beta``.
Two costs pull in opposite directions. Each slice costs ``alpha``, so B bytes in slices of s cost
``alpha B / s`` in addition to the bytes. And an urgent gradient, whose own slice is small
(SliceLayout), waits for the slices in flight: ``beta k s`` with k slices in flight. The sum is
least at ``s = sqrt(alpha B / (beta k))``. Alpha is the cost of a slice on the link, or the latency
if that is larger: during training a slice costs processor time as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from statistics import quantiles
from typing import Literal

__all__ = [
    "PROBE_BYTES",
    "Cut",
    "LinkModel",
    "arrival_cut",
    "best_cut",
    "cut_of",
    "measured_link",
    "reservation_lead_s",
]

_SMALLEST_BYTES = 64 * 1024
_LARGEST_BYTES = 16 * 2**20
_STEP_BYTES = 16 * 1024  # slice sizes are multiples of this
_MOST_IN_FLIGHT = 16
_FUSED_BYTES = 25 * 2**20  # at most, DDP's default bucket
_FUSED_PARTS = 8  # at least: with one part a small model would not overlap with backward
_SLICE_FACTOR, _CREDIT_FACTOR = 1.4, 1.6  # closer cuts count as the same


@dataclass(frozen=True)
class Cut:
    """Slice settings.

    Attributes:
        slice_bytes: unit of transfer.
        credit_bytes: bytes that may be in flight at once.
        policy: rule that picks the next ready slice.
    """

    slice_bytes: int
    credit_bytes: int
    policy: Literal["priority", "arrival"] = "priority"

    def with_settings(
        self,
        slice_bytes: int | None,
        credit_bytes: int | None,
        policy: Literal["priority", "arrival"],
    ) -> Cut:
        """Returns a copy with the settings that the user has given."""
        cut = self
        if slice_bytes is not None:
            in_flight = cut.credit_bytes // cut.slice_bytes
            cut = Cut(slice_bytes, in_flight * slice_bytes)
        if credit_bytes is not None:
            cut = Cut(min(cut.slice_bytes, credit_bytes), credit_bytes)
        return replace(cut, policy=policy)

    def resembles(self, other: Cut) -> bool:
        """Whether the two cuts are too similar for trials to distinguish."""
        return (
            self.policy == other.policy
            and _within(self.slice_bytes, other.slice_bytes, _SLICE_FACTOR)
            and _within(self.credit_bytes, other.credit_bytes, _CREDIT_FACTOR)
        )


@dataclass(frozen=True)
class LinkModel:
    """Measured latency and cost of a transport.

    Attributes:
        latency_s: time of a nearly empty all-reduce, alone.
        slice_cost_s: cost of a slice besides its bytes while others are in flight; alpha above.
        seconds_per_byte: beta above, for an all-reduce among all ranks.
    """

    latency_s: float
    slice_cost_s: float
    seconds_per_byte: float

    @classmethod
    def from_streams(
        cls,
        latency_s: float,
        small: tuple[int, int, float],
        large: tuple[int, int, float],
    ) -> LinkModel:
        """Solves two measurements for slice cost and seconds per byte.

        Args:
            latency_s: same as the attribute.
            small, large: (slices, bytes of each, seconds for all), several in flight at a time.
        """
        small_count, small_bytes, small_s = small
        large_count, large_bytes, large_s = large
        each_small, each_large = small_s / small_count, large_s / large_count
        if each_large > each_small:
            beta = (each_large - each_small) / (large_bytes - small_bytes)
            cost_s = each_small - small_bytes * beta
        else:
            # A disturbance delayed the small slices, so the slice cost is unknown. Without a slice
            # cost, the cost of bytes is overestimated instead of lost.
            beta, cost_s = each_large / large_bytes, 0.0
        # Slices in flight hide each other's latency on an idle machine only: threads that pass
        # them on wait for a core while a model trains.
        return cls(latency_s, max(cost_s, latency_s / 2, 1e-6), beta)


_ROUNDS = 5
_TINY_BYTES = 1024
_SMALL = (16, 128 * 1024)  # slices, bytes of each
_LARGE = (4, 2**20)
PROBE_BYTES = _LARGE[0] * _LARGE[1]
"""Memory that the measurement of a transport needs."""


def measured_link(time_stream: Callable[[list[int]], float]) -> LinkModel:
    """Times streams of all-reduces of up to 4 MiB in total, several times each.

    Args:
        time_stream: runs all-reduces of these sizes in bytes, two or more in flight at a time, and
            returns the seconds taken; the transport is otherwise idle.
    """
    latency_s = _undisturbed(time_stream([_TINY_BYTES]) for _ in range(4 * _ROUNDS))
    times = []
    for count, size_bytes in (_SMALL, _LARGE):
        took = _undisturbed(time_stream([size_bytes] * count) for _ in range(_ROUNDS))
        times.append((count, size_bytes, took))
    return LinkModel.from_streams(latency_s, *times)


def _undisturbed(seconds: Iterable[float]) -> float:
    """The lower quartile: disturbances only add time."""
    return quantiles(seconds, n=4)[0]


def best_cut(link: LinkModel, total_bytes: int, in_flight: int = 2) -> Cut:
    """The cut with the least sum of both costs for ``total_bytes`` of gradients.

    Args:
        in_flight: least number of slices that keeps the transport busy.
    """
    # Messages and wake-ups take processor time, which an idle transport does not show.
    alpha_s = max(link.slice_cost_s, link.latency_s)
    size = math.sqrt(alpha_s * total_bytes / (link.seconds_per_byte * in_flight))
    size = min(max(size, _SMALLEST_BYTES), _LARGEST_BYTES)
    slice_bytes = cut_of(size, 1).slice_bytes
    # Two slices do not fill a link of high latency: others must travel during an acknowledgment.
    slice_s = slice_bytes * link.seconds_per_byte
    in_flight = min(max(in_flight, 1 + math.ceil(link.latency_s / slice_s)), _MOST_IN_FLIGHT)
    return Cut(slice_bytes, in_flight * slice_bytes)


def cut_of(
    slice_bytes: float, in_flight: int, policy: Literal["priority", "arrival"] = "priority"
) -> Cut:
    """Rounds the slice size and sets the credit to ``in_flight`` slices."""
    size = max(round(slice_bytes / _STEP_BYTES), 1) * _STEP_BYTES
    return Cut(size, in_flight * size, policy)


def reservation_lead_s(link: LinkModel, cut: Cut) -> float:
    """Seconds before the most urgent gradient by which the last large slice should begin.

    The slices in flight then need this long to arrive. The window is full or half full, so it holds
    three quarters of the credit on average. A link that falls idle early costs as much as a
    gradient that waits equally long.
    """
    return 0.0 if cut.policy == "arrival" else 0.75 * cut.credit_bytes * link.seconds_per_byte


def arrival_cut(total_bytes: int) -> Cut:
    """DDP's method: large slices of neighbouring gradients, sent in order of arrival."""
    size = min(max(total_bytes / _FUSED_PARTS, _SMALLEST_BYTES), _FUSED_BYTES)
    return cut_of(size, 2, "arrival")


def _within(one: int, other: int, factor: float) -> bool:
    return max(one, other) <= factor * min(one, other)
