"""Crux' compression of priorities to a few hardware levels: a cut of a graph of conflicts.

Source: Cao et al., "Crux", SIGCOMM 2024, section 4.3 and algorithm 1.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np

from hvd_order.base.errors import InvalidUsage

__all__ = ["compress", "cut"]

_SAMPLES = 10  # m of algorithm 1


def cut(edges: Mapping[tuple[int, int], float], levels: list[int]) -> float:
    """Weight of the edges between jobs of different levels."""
    return sum(weight for (high, low), weight in edges.items() if levels[high] != levels[low])


def compress(
    count: int,
    edges: Mapping[tuple[int, int], float],
    levels: int,
    draw: random.Random,
    samples: int = _SAMPLES,
) -> list[int]:
    """Levels of ``count`` jobs, 0 first, so that edges of the most weight lie between levels.

    Samples topological orders, finds the best cut of each into consecutive parts by dynamic
    programming, and takes the best. No job gets a later level than one that it goes before. The
    dynamic program tries all ends of a part, O(n^2 K); the paper's monotone one saves a factor n.

    Args:
        edges: (higher job, lower job) and what is lost when both have one level.
        levels: how many there are.

    Raises:
        InvalidUsage: there is no level, or jobs go before each other in a circle.
    """
    if levels < 1:
        raise InvalidUsage(f"{levels} levels of priority; expected at least 1")
    best, best_cut = [0] * count, -1.0
    for _ in range(samples):
        order = _topological(count, edges, draw)
        found = _cut_order(order, edges, levels)
        value = cut(edges, found)
        if value > best_cut:
            best, best_cut = found, value
    return best


def _topological(
    count: int, edges: Mapping[tuple[int, int], float], draw: random.Random
) -> list[int]:
    before = [0] * count
    behind: list[list[int]] = [[] for _ in range(count)]
    for high, low in edges:
        before[low] += 1
        behind[high].append(low)
    free = [job for job in range(count) if not before[job]]
    order = []
    while free:
        job = free.pop(draw.randrange(len(free)))
        order.append(job)
        for low in behind[job]:
            before[low] -= 1
            if not before[low]:
                free.append(low)
    if len(order) < count:
        raise InvalidUsage("jobs go before each other in a circle; priorities need an order")
    return order


def _cut_order(order: list[int], edges: Mapping[tuple[int, int], float], levels: int) -> list[int]:
    count = len(order)
    place = {job: i for i, job in enumerate(order)}
    weight = np.zeros((count + 1, count + 1))
    for (high, low), value in edges.items():
        weight[place[high] + 1, place[low] + 1] = value
    sums = weight.cumsum(axis=0).cumsum(axis=1)
    # crossing[j, i]: weight from the first j jobs to those behind them up to the i-th.
    crossing = sums - np.diagonal(sums)[:, None]
    crossing[np.tril_indices(count + 1, -1)] = -np.inf
    best = np.zeros(count + 1)  # one part: nothing is cut
    ends = []
    for _ in range(levels - 1):
        options = best[:, None] + crossing
        ends.append(options.argmax(axis=0))
        best = options.max(axis=0)
    found = [0] * count
    end = count
    for level in range(levels - 1, 0, -1):
        begin = int(ends[level - 1][end])
        for i in range(begin, end):
            found[order[i]] = level
        end = begin
    return found
