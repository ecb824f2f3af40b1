"""Which slices to move so that servers of different speeds finish together."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Move", "longest_s", "moves_between", "rebalance", "shortest_s", "taken_over"]

_ENOUGH = 1.02  # times the time that would be ideal without slices
_LOOK_AT = 32  # slices of a size, evenly spread; more would hardly be better, but slow
_LESS = 1 - 1e-9  # beyond rounding


@dataclass(frozen=True)
class Move:
    """A slice changes its server."""

    slice: int
    source: int
    target: int
    size_bytes: int


def moves_between(
    before: Sequence[int], after: Sequence[int], sizes: Sequence[int]
) -> tuple[Move, ...]:
    """What leads from one list of owners to another."""
    return tuple(
        Move(i, source, target, sizes[i])
        for i, (source, target) in enumerate(zip(before, after, strict=True))
        if source != target
    )


def shortest_s(sizes: Sequence[int], speeds: Mapping[int, float]) -> float:
    """A time that no assignment can beat: bytes cut at will, but the largest slice on one server.

    Args:
        speeds: bytes a second by server; positive.
    """
    return max(sum(sizes) / sum(speeds.values()), max(sizes, default=0) / max(speeds.values()))


def longest_s(owner: Sequence[int], sizes: Sequence[int], speeds: Mapping[int, float]) -> float:
    """When the last server is finished."""
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
    """Moves few bytes until the last server to finish is close to the ideal, or nothing helps.

    A server of speed v should have B v / sum(v) of B bytes. Whoever finishes last gives the largest
    slice that is no more than what it has too much and another lacks, so no byte moves that need
    not; only if there is no such slice, the one that makes the two finish soonest.

    Args:
        owner: by slice, all in ``speeds``.
        sizes: bytes by slice.
        speeds: bytes a second by server; positive.
        receivers: who may get slices; not given: all.
        most_bytes: moves no more, except that the first slice may be larger.

    Returns:
        The new owners.

    Source:
        Chen et al., "Elastic parameter server load distribution", SoCC 2020, as
        reconstructed without its text.
    """
    holdings = _Holdings(owner, sizes, speeds)
    ideal_s = sum(sizes) / sum(speeds.values())
    wanted = {server: speed * ideal_s for server, speed in speeds.items()}
    others = list(speeds) if receivers is None else list(receivers)
    moved = 0
    # Each move makes the sorted times smaller; the bound is for the sake of rounding alone.
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
    """Gives new owners to the slices of servers that are gone, and moves no others.

    Args:
        speeds: bytes a second of the living servers; positive.
    """
    holdings = _Holdings(owner, sizes, speeds)
    orphans = [i for i, server in enumerate(owner) if server not in speeds]
    for i in sorted(orphans, key=lambda i: (-sizes[i], i)):
        holdings.give(i, holdings.soonest(sizes[i], list(speeds)))
    return tuple(holdings.owner)


class _Holdings:
    """Who has what while slices are moved about."""

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
        """When a server would be finished with so many bytes more."""
        return (self.load[server] + more) / self._speeds[server]

    def sizes_of(self, server: int) -> list[int]:
        """The different sizes of its slices, greatest first, without empty ones."""
        return sorted((size for size in self._by_size[server] if size), reverse=True)

    def soonest(self, size: int, servers: Sequence[int]) -> int:
        """Who would be finished first with so many bytes more."""
        return min(servers, key=lambda server: self.finish_s(server, size))

    def farthest(self, donor: int, size: int, receiver: int) -> int:
        """Of the donor's slices of that size one far from all that the receiver has.

        So that neighbours stay on different servers.
        """
        there = self._held[receiver]
        same = self._by_size[donor][size]

        def distance(i: int) -> float:
            at = bisect_left(there, i)
            return min((abs(i - other) for other in there[max(at - 1, 0) : at + 1]), default=0)

        return max(same[:: 1 + len(same) // _LOOK_AT], key=distance)

    def give(self, i: int, receiver: int) -> None:
        """The slice goes to another server."""
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
    """A size and a receiver: no more than the one has too much and the other lacks."""
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
    """A size and a receiver after whose move both finish before the donor does now."""
    takers = [server for server in receivers if server != donor]
    if not takers:
        return None
    best: tuple[float, int, int] | None = None
    for size in sizes:
        taker = holdings.soonest(size, takers)
        after_s = max(holdings.finish_s(donor, -size), holdings.finish_s(taker, size))
        if best is None or after_s <= best[0]:  # of equal ones the smallest
            best = (after_s, size, taker)
    if best is None or best[0] >= _LESS * holdings.finish_s(donor):
        return None
    return best[1], best[2]
