"""CASSINI's circle: periodic demands of jobs on one link, and how they fit beside each other.

Source: Rajasekaran et al., "CASSINI: Network-Aware Job Scheduling in Machine Learning Clusters",
NSDI 2024, as public descriptions and a reimplementation tell it (not read): perimeter, score,
rotations. Which rotations are tried when there are many is reconstructed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from hvd_order.base.errors import InvalidUsage

__all__ = ["Demand", "best_rotations", "score"]

Demand = NDArray[np.float64]
"""Part of a link that a job asks for in each interval of its iteration."""

_LARGEST = 1_000_000  # intervals of a circle
_TRIED = 20_000  # most rotations that are tried one by one


def score(demands: Sequence[Demand], rotations: Sequence[int] | None = None) -> float:
    """1 - mean over the circle of the demand beyond the link; 1: the jobs do not disturb.

    The circle is as long as the least common multiple of the iterations. All intervals are equally
    long.

    Args:
        rotations: intervals by which each job is late, within its iteration; None: 0.

    Raises:
        InvalidUsage: the circle is too long.
    """
    length = _perimeter(demands)
    total = np.zeros(length)
    for demand, rotation in zip(demands, rotations or [0] * len(demands), strict=True):
        total += np.tile(np.roll(demand, rotation), length // len(demand))
    return 1.0 - float(np.maximum(total - 1.0, 0.0).mean())


def best_rotations(demands: Sequence[Demand]) -> tuple[float, list[int]]:
    """The best score found, and the rotations that reach it; the first job's is 0.

    Tries all rotations of up to 20,000; of more it turns one job after the other to its best
    place, until none moves.

    Raises:
        InvalidUsage: the circle is too long.
    """
    length = _perimeter(demands)
    if len(demands) < 2:
        return score(demands), [0] * len(demands)
    if math.prod(len(demand) for demand in demands[1:]) <= _TRIED:
        return _try_all(demands, length)
    rotations = [0] * len(demands)
    best = score(demands)
    while True:
        before = best
        for job in range(1, len(demands)):
            others = _total(demands, rotations, length, without=job)
            for rotation, value in _turned(others, demands[job]):
                if value > best + 1e-12:
                    best, rotations[job] = value, rotation
        if best <= before:
            return best, rotations


def _perimeter(demands: Sequence[Demand]) -> int:
    length = math.lcm(*(len(demand) for demand in demands))
    if length > _LARGEST:
        lengths = [len(demand) for demand in demands]
        raise InvalidUsage(f"a circle of {length} intervals for iterations of {lengths}; "
                           "take longer intervals")  # fmt: skip
    return length


def _total(
    demands: Sequence[Demand], rotations: Sequence[int], length: int, without: int
) -> Demand:
    total = np.zeros(length)
    for i, (demand, rotation) in enumerate(zip(demands, rotations, strict=True)):
        if i != without:
            total += np.tile(np.roll(demand, rotation), length // len(demand))
    return total


def _turned(others: Demand, demand: Demand) -> Iterator[tuple[int, float]]:
    """Score by rotation of one more job."""
    folded = others.reshape(-1, len(demand))
    for rotation in range(len(demand)):
        over = np.maximum(folded + np.roll(demand, rotation) - 1.0, 0.0)
        yield rotation, 1.0 - float(over.mean())


def _try_all(demands: Sequence[Demand], length: int) -> tuple[float, list[int]]:
    best, found = -math.inf, [0] * len(demands)
    last = len(demands) - 1
    for middle in itertools.product(*(range(len(demand)) for demand in demands[1:last])):
        others = _total(demands, [0, *middle, 0], length, without=last)
        for rotation, value in _turned(others, demands[last]):
            if value > best + 1e-12:
                best, found = value, [0, *middle, rotation]
    return best, found
