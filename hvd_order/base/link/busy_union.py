"""A link's bandwidth from the transfers on it: their bytes over the union of their intervals.

Both ends of the intervals are read from the receiver's clock. A transfer begins when its header is
there and ends when its payload is. The receiver looks at both only when it has handled the transfer
before, so a receiver that is slower than the link sees the beginning too late. Then the transfer
may have begun as early as the one before it ended, and the union that is counted includes the
receiver's work: the bandwidth is *at least* that.

After a pause the first bytes do not count, if enough others are left: a shaped link (a token
bucket) lets them pass faster than its rate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["LinkUse", "ReceivedTimes", "busy_ns", "link_use"]

# A header that is there within this time was there before: a thread that sleeps needs longer.
_AT_ONCE_NS = 20_000
# Smaller transfers arrive together with their header, so their time says nothing about a link.
_LEAST_BYTES = 64 * 1024
_CERTAIN = 0.8  # least share of the counted time that transfers surely took
_BUCKET_BYTES = 256 * 1024  # more than shaped links let pass at once
_STEADY = 0.1  # least share of the bytes behind these, for them alone to count

Interval = tuple[int, int]


@dataclass(frozen=True)
class ReceivedTimes:
    """A received slice; times in nanoseconds of the receiving host's monotonic clock.

    Attributes:
        size_bytes: of the slice.
        before_ns: the frame before it, of any kind, was complete.
        free_ns: the receiving thread had handled that frame and waited for this one.
        began_ns: the thread had the header.
        came_ns: the thread had the payload.
        handled_ns: the thread was done with it.
        thread: number of the thread.
    """

    size_bytes: int
    before_ns: int
    free_ns: int
    began_ns: int
    came_ns: int
    handled_ns: int
    thread: int = 0

    @property
    def longest(self) -> Interval:
        """The interval that the transfer may have taken at most."""
        was_there = self.began_ns - self.free_ns < _AT_ONCE_NS
        return (self.before_ns if was_there and self.before_ns else self.began_ns), self.came_ns

    @property
    def shortest(self) -> Interval:
        """The interval in which the transfer was surely under way."""
        return self.began_ns, self.came_ns


@dataclass(frozen=True)
class LinkUse:
    """The transfers of one direction.

    Attributes:
        transfers, size_bytes: number and sum of the transfers.
        busy_s: length of the union of their intervals.
        bytes_per_s: None if the transfers are too small to tell.
        at_least: the receiver, not the link, may have been what took the time.
    """

    transfers: int
    size_bytes: int
    busy_s: float
    bytes_per_s: float | None
    at_least: bool


def busy_ns(intervals: Iterable[Interval]) -> int:
    """Length of the union of intervals."""
    total, end = 0, None
    for begin, until in sorted(intervals):
        if end is None or begin > end:
            total, end = total + until - begin, until
        elif until > end:
            total, end = total + until - end, until
    return total


def _steady(transfers: Iterable[tuple[Interval, int]]) -> tuple[int, int]:
    """Bytes, and length of the union, of what goes on behind the first bytes after each pause.

    A transfer that began before counts with its time only, so of several connections a little less
    than the link carried counts.
    """
    size = took = passed = 0
    end, since = -1, None
    for (begin, until), each in sorted(transfers):
        if begin > end:
            passed, since = 0, None
        elif since is not None:
            size += each if begin >= since else 0
            took += max(0, until - end)
        passed += each
        end = max(end, until)
        if since is None and passed >= _BUCKET_BYTES:
            since = end
    return size, took


def link_use(received: Sequence[Sequence[ReceivedTimes]], one_clock: bool) -> LinkUse:
    """Sums up one direction of a worker's link.

    Args:
        received: transfers of each connection.
        one_clock: the receivers are on one host. Otherwise intervals of two connections cannot be
            compared; they count as if none overlapped, and the bandwidth is *at least* the result.
    """
    every = [one for connection in received for one in connection]
    groups = [every] if one_clock else list(received)
    longest = sum(busy_ns(one.longest for one in group) for group in groups)
    shortest = sum(busy_ns(one.shortest for one in group) for group in groups)
    size = sum(one.size_bytes for one in every)
    large = sum(one.size_bytes for one in every if one.size_bytes >= _LEAST_BYTES)
    steady = [_steady((one.longest, one.size_bytes) for one in group) for group in groups]
    counted, took = (sum(part) for part in zip(*steady, strict=True)) if steady else (0, 0)
    if took == 0 or counted < _STEADY * size:
        counted, took = size, longest
    can_tell = longest > 0 and 2 * large >= size
    return LinkUse(
        len(every),
        size,
        longest / 1e9,
        counted / took * 1e9 if can_tell else None,
        shortest < _CERTAIN * longest or (not one_clock and len(received) > 1),
    )
