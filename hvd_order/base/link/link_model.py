"""Cost of transfers on a link, from a few timed all-reduces.

The model (Hockney, Parallel Computing 20, 1994): an all-reduce of n bytes takes ``alpha + n beta``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import quantiles

__all__ = ["PROBE_BYTES", "LinkModel", "measured_link", "transfer_s"]


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
_AIM_S = 1.0  # for the measurement; a link on which a round takes longer is measured once
_TINY_BYTES = 1024
_SMALL = (16, 128 * 1024)  # slices, bytes of each
_LARGE = (4, 2**20)
PROBE_BYTES = _LARGE[0] * _LARGE[1]
"""Memory that the measurement of a transport needs."""


def transfer_s(size_bytes: int, link: LinkModel) -> float:
    """Time that a message occupies the link: cost of a message plus its bytes."""
    return link.slice_cost_s + size_bytes * link.seconds_per_byte


def measured_link(
    time_stream: Callable[[list[int]], float], longest: Callable[[float], float]
) -> LinkModel:
    """Times streams of all-reduces of up to 4 MiB in total: several times each, on slow links once.

    Args:
        time_stream: runs all-reduces of these sizes in bytes, two or more in flight at a time, and
            returns the seconds taken; the transport is otherwise idle.
        longest: of a time on each rank, returns that of the slowest, so that all ranks time as
            many streams.
    """
    latency_s = _undisturbed([time_stream([_TINY_BYTES]) for _ in range(4 * _ROUNDS)])
    streams = [[size_bytes] * count for count, size_bytes in (_SMALL, _LARGE)]
    first_s = time_stream(streams[0])
    share = sum(map(sum, streams)) / sum(streams[0])
    rounds = min(max(int(_AIM_S / (share * longest(first_s))), 1), _ROUNDS)
    small_s = _undisturbed([first_s, *(time_stream(streams[0]) for _ in range(rounds - 1))])
    large_s = _undisturbed([time_stream(streams[1]) for _ in range(rounds)])
    return LinkModel.from_streams(latency_s, (*_SMALL, small_s), (*_LARGE, large_s))


def _undisturbed(seconds: Sequence[float]) -> float:
    """The lower quartile: disturbances only add time."""
    return quantiles(seconds, n=4)[0] if len(seconds) > 2 else min(seconds)
