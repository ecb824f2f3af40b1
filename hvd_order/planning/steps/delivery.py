"""One shared link: durations of transfers, and their arrival under given priorities."""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from hvd_order.base.errors import InvalidUsage
from hvd_order.base.link.link_model import LinkModel, transfer_s

__all__ = ["GradientDelivery", "LinkQueue", "piece_times"]


@dataclass(frozen=True)
class GradientDelivery:
    """A gradient that has to reach the next forward pass.

    Attributes:
        release_s: time at which the gradient is computed, from the start of its step.
        due_s: time at which its reader could start if no op waited, on the same clock.
    """

    name: str
    size_bytes: int
    release_s: float
    due_s: float


def piece_times(size_bytes: int, link: LinkModel, slice_bytes: int | None) -> list[float]:
    """Time that each slice of a tensor occupies the link; one piece without cost if None (fluid).

    Raises:
        InvalidUsage: ``slice_bytes`` is not positive.
    """
    if slice_bytes is None:
        return [size_bytes * link.seconds_per_byte]
    if slice_bytes <= 0:
        raise InvalidUsage(f"a slice of {slice_bytes} bytes carries nothing; give a positive size")
    whole, rest = divmod(size_bytes, slice_bytes)
    sizes = [slice_bytes] * whole + [rest] * (rest > 0 or whole == 0)
    return [transfer_s(size, link) for size in sizes]


@dataclass(order=True)
class _WaitingGradient:
    priority: tuple[float, ...]
    number: int  # order of arrival, which breaks ties of priority
    key: Hashable = field(compare=False)
    left_s: list[float] = field(compare=False)  # time of each piece, the next piece last


class LinkQueue:
    """A link that always moves the most urgent transfer it has.

    If ``fluid``, a more urgent transfer interrupts at once and at no cost, else when the slice in
    flight has ended. Time only moves forward: transfers are added in order of readiness.
    """

    def __init__(self, *, fluid: bool) -> None:
        self._fluid = fluid
        self._waiting: list[_WaitingGradient] = []
        self._added = 0
        self._now_s = 0.0
        self._ended: dict[Hashable, float] = {}

    @property
    def backlog_s(self) -> float:
        """Remaining work of the link in seconds."""
        return math.fsum(second for each in self._waiting for second in each.left_s)

    def add(
        self, key: Hashable, priority: tuple[float, ...], ready_s: float, piece_s: Sequence[float]
    ) -> None:
        """Adds a transfer that became ready.

        Args:
            priority: priority of the transfer; the smallest goes first.
            piece_s: time that each piece occupies the link; at least one piece.
        """
        self.advance(ready_s)
        self._now_s = max(self._now_s, ready_s)
        entry = _WaitingGradient(priority, self._added, key, list(reversed(piece_s)))
        heapq.heappush(self._waiting, entry)
        self._added += 1

    def advance(self, until_s: float) -> None:
        """Advances time; a slice that began before ``until_s`` may end after it."""
        while self._waiting and self._now_s < until_s:
            self._serve(until_s)

    def end_s(self, key: Hashable) -> float:
        """Time at which its last byte has left if no transfer is added before. Call once."""
        while key not in self._ended:
            self._serve(math.inf)
        return self._ended.pop(key)

    def _serve(self, until_s: float) -> None:
        first = self._waiting[0]
        piece_s = first.left_s.pop()
        if self._fluid and self._now_s + piece_s > until_s:
            first.left_s.append(piece_s - (until_s - self._now_s))
            self._now_s = until_s
            return
        self._now_s += piece_s
        if not first.left_s:
            self._ended[heapq.heappop(self._waiting).key] = self._now_s
