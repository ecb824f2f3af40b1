"""Choice of slices to move so that servers of different speeds finish together."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Move", "longest_s", "moves_between", "rebalance", "shortest_s", "taken_over"]

_ENOUGH = 1.02  # times the ideal time for infinitely small slices
_LOOK_AT = 32  # slices of one size, evenly spread; more would be slow and hardly better
_LESS = 1 - 1e-9  # allows for rounding


@dataclass(frozen=True)
class Move:
    """A slice's move to another server."""

    slice: int
    source: int
    target: int
    size_bytes: int


def moves_between(
    before: Sequence[int], after: Sequence[int], sizes: Sequence[int]
) -> tuple[Move, ...]:
    """Returns the moves between two lists of owners."""
    return tuple(
        Move(i, source, target, sizes[i])
        for i, (source, target) in enumerate(zip(before, after, strict=True))
        if source != target
    )


def shortest_s(sizes: Sequence[int], speeds: Mapping[int, float]) -> float:
    """Returns a time that no assignment can beat: bytes divide freely, except in the largest
    slice.

    Args:
        sizes: bytes by slice.
        speeds: bytes a second by server; positive.
    """
    return max(sum(sizes) / sum(speeds.values()), max(sizes, default=0) / max(speeds.values()))


def longest_s(owner: Sequence[int], sizes: Sequence[int], speeds: Mapping[int, float]) -> float:
    """Returns the time at which the last server finishes."""
    load = dict.fromkeys(speeds, 0)
    for server, size in zip(owner, sizes, strict=True):
        load[server] += size
    return max(load[server] / speed for server, speed in speeds.items())


def rebalance(
    owner: Sequence[int],
    sizes: Sequence[int],
    speeds: Mapping[int, float],
    *,
    receivers: Collection[int] | None = None,
    most_bytes: float = math.inf,
) -> tuple[int, ...]:
    """Moves few bytes until the last server finishes close to the ideal time, or no move helps.

    A server of speed v should have B v / sum(v) of B bytes. The last server to finish gives away
    the largest slice that exceeds neither its surplus nor another server's deficit, so no byte
    moves without need. Only if no such slice exists, the slice moves that makes the two servers
    finish soonest.

    Args:
        owner: by slice, all in ``speeds``.
        sizes: bytes by slice.
        speeds: bytes a second by server; positive.
        receivers: servers that may get slices; default: all.
        most_bytes: limit of the moved bytes, but the first slice may be larger.

    Returns:
        The new owners.

    Source:
        Chen et al., "Elastic parameter server load distribution", SoCC 2020, as reconstructed
        without its text.
    """
    holdings = _Holdings(owner, sizes, speeds)
    ideal_s = sum(sizes) / sum(speeds.values())
    wanted = {server: speed * ideal_s for server, speed in speeds.items()}
    others = list(speeds) if receivers is None else list(receivers)
    moved = 0
    # Each move makes the sorted times smaller; the bound only guards against rounding.
    for _ in range(4 * len(sizes)):
        donor = max(speeds, key=holdings.finish_s)
        if holdings.finish_s(donor) <= _ENOUGH * ideal_s:
            break
        most = most_bytes - moved if moved else math.inf
        sizes_here = [size for size in holdings.sizes_of(donor) if size <= most]
        found = _fitting(holdings, donor, sizes_here, others, wanted)
        found = found or _helpful(holdings, donor, sizes_here, others)
        if found is None:
            break
        size, receiver = found
        holdings.give(holdings.farthest(donor, size, receiver), receiver)
        moved += size
    return tuple(holdings.owner)


def taken_over(
    owner: Sequence[int], sizes: Sequence[int], speeds: Mapping[int, float]
) -> tuple[int, ...]:
    """Gives new owners to the slices of servers that have left, and moves no other slices.

    Args:
        owner: by slice.
        sizes: bytes by slice.
        speeds: bytes a second of the live servers; positive.
    """
    holdings = _Holdings(owner, sizes, speeds)
    orphans = [i for i, server in enumerate(owner) if server not in speeds]
    for i in sorted(orphans, key=lambda i: (-sizes[i], i)):
        holdings.give(i, holdings.soonest(sizes[i], list(speeds)))
    return tuple(holdings.owner)


class _Holdings:
    """The slices of each server during a rebalance."""

    def __init__(
        self, owner: Sequence[int], sizes: Sequence[int], speeds: Mapping[int, float]
    ) -> None:
        self.owner = list(owner)
        self.load = dict.fromkeys(speeds, 0)
        self._sizes = sizes
        self._speeds = speeds
        self._held: dict[int, list[int]] = {server: [] for server in speeds}  # ascending
        self._by_size: dict[int, dict[int, list[int]]] = {server: {} for server in speeds}
        for i, server in enumerate(owner):
            if server in speeds:
                self._take(i, server)

    def finish_s(self, server: int, more: int = 0) -> float:
        """Returns the time at which a server would finish with ``more`` extra bytes."""
        return (self.load[server] + more) / self._speeds[server]

    def sizes_of(self, server: int) -> list[int]:
        """Returns the distinct sizes of a server's slices, largest first, without empty ones."""
        return sorted((size for size in self._by_size[server] if size), reverse=True)

    def soonest(self, size: int, servers: Sequence[int]) -> int:
        """Returns the server that would finish first with ``size`` extra bytes."""
        return min(servers, key=lambda server: self.finish_s(server, size))

    def farthest(self, donor: int, size: int, receiver: int) -> int:
        """Returns one of the donor's slices of that size that is far from all of the receiver's.

        Neighbours thus stay on different servers.
        """
        there = self._held[receiver]
        same = self._by_size[donor][size]

        def distance(i: int) -> float:
            at = bisect_left(there, i)
            return min((abs(i - other) for other in there[max(at - 1, 0) : at + 1]), default=0)

        return max(same[:: 1 + len(same) // _LOOK_AT], key=distance)

    def give(self, i: int, receiver: int) -> None:
        """Moves a slice to another server."""
        donor, size = self.owner[i], self._sizes[i]
        if donor in self._speeds:
            self.load[donor] -= size
            self._held[donor].remove(i)
            same = self._by_size[donor][size]
            same.remove(i)
            if not same:
                del self._by_size[donor][size]
        self.owner[i] = receiver
        self._take(i, receiver)

    def _take(self, i: int, server: int) -> None:
        self.load[server] += self._sizes[i]
        insort(self._held[server], i)
        insort(self._by_size[server].setdefault(self._sizes[i], []), i)


def _fitting(
    holdings: _Holdings,
    donor: int,
    sizes: Sequence[int],
    receivers: Sequence[int],
    wanted: Mapping[int, float],
) -> tuple[int, int] | None:
    """Returns a size and a receiver, within the donor's surplus and the receiver's deficit."""
    surplus = holdings.load[donor] - wanted[donor]
    lack = {server: wanted[server] - holdings.load[server] for server in receivers}
    for size in sizes:
        takers = [server for server in receivers if size <= lack[server] and server != donor]
        if size <= surplus and takers:
            return size, holdings.soonest(size, takers)
    return None


def _helpful(
    holdings: _Holdings, donor: int, sizes: Sequence[int], receivers: Sequence[int]
) -> tuple[int, int] | None:
    """Returns a size and a receiver such that after the move both finish before the donor does
    now.
    """
    takers = [server for server in receivers if server != donor]
    if not takers:
        return None
    best: tuple[float, int, int] | None = None
    for size in sizes:
        taker = holdings.soonest(size, takers)
        after_s = max(holdings.finish_s(donor, -size), holdings.finish_s(taker, size))
        if best is None or after_s <= best[0]:  # the smallest of equally good sizes
            best = (after_s, size, taker)
    if best is None or best[0] >= _LESS * holdings.finish_s(donor):
        return None
    return best[1], best[2]
