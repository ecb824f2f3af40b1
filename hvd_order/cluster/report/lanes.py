"""Where in the row of its machine a job is drawn, so that jobs beside each other do not overlap."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hvd_order.cluster.report.occupancy import Bar

__all__ = ["LaneBox", "boxes_of"]

_CLOSE = 1e-9


class LaneBox(NamedTuple):
    """A bar, or a part of it, from ``low`` to ``high`` of its machine's amount."""

    bar: Bar
    low: float
    high: float


def boxes_of(bars: Sequence[Bar], capacities: Sequence[float]) -> list[LaneBox]:
    """Gives each bar the lowest free part of its machine, in several pieces if it must.

    Args:
        capacities: amount of each machine, in the units of the bars.
    """
    boxes: list[LaneBox] = []
    taken: list[list[tuple[float, float]]] = [[] for _ in bars]
    free: dict[int, list[tuple[float, float]]] = {}
    # At one moment those that end come first. The sort is stable: the same bars, the same picture.
    moments = sorted(
        [(bar.begin_s, 1, i) for i, bar in enumerate(bars)]
        + [(bar.end_s, 0, i) for i, bar in enumerate(bars)]
    )
    for _, begins, number in moments:
        bar = bars[number]
        holes = free.setdefault(bar.machine, [(0.0, capacities[bar.machine])])
        if begins:
            taken[number] = _take(holes, bar.amount)
            boxes += [LaneBox(bar, low, high) for low, high in taken[number]]
        else:
            _give_back(holes, taken[number])
    return boxes


def _take(holes: list[tuple[float, float]], amount: float) -> list[tuple[float, float]]:
    """A hole that holds all of it, else pieces of the lowest ones."""
    whole = [i for i, (low, high) in enumerate(holes) if high - low >= amount - _CLOSE]
    pieces = []
    at = whole[0] if whole else 0
    while amount > _CLOSE and at < len(holes):
        low, high = holes[at]
        cut = min(low + amount, high)
        pieces.append((low, cut))
        amount -= cut - low
        if high - cut > _CLOSE:
            holes[at] = (cut, high)
        else:
            del holes[at]
    return pieces


def _give_back(holes: list[tuple[float, float]], pieces: Iterable[tuple[float, float]]) -> None:
    for piece in pieces:
        bisect.insort(holes, piece)
    joined: list[tuple[float, float]] = []
    for low, high in holes:
        if joined and low - joined[-1][1] <= _CLOSE:
            joined[-1] = (joined[-1][0], high)
        else:
            joined.append((low, high))
    holes[:] = joined
