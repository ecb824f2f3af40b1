"""Randomised rounding of a covering and packing problem.

Source: Yu et al. (PD-ORS), IEEE TNSE 9(4), 2022, as reconstructed. The second factor has the form
of M_delta in Yu et al., "A Sum-of-Ratios Multi-Dimensional-Knapsack Decomposition for DNN Resource
Scheduling" (SMD), INFOCOM 2021.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from hvd_order.base.errors import InvalidUsage

__all__ = ["covering_factor", "packing_factor", "round_randomly"]


def covering_factor(rows: int, width: float, delta: float) -> float:
    """Factor before rounding with which each covering row holds with 1 - delta / (3 rows).

    Args:
        width: least of the right sides over the coefficients of the covering rows.
    """
    _check(rows, width, delta)
    part = math.log(3 * rows / delta) / width
    return 1 + part + math.sqrt(part * part + 2 * part)


def packing_factor(rows: int, width: float, delta: float) -> float:
    """Factor before rounding with which each packing row holds with 1 - delta / (3 rows)."""
    _check(rows, width, delta)
    part = 3 * math.log(3 * rows / delta) / (2 * width)
    return 1 + part - math.sqrt(part * part + 2 * part)


def _check(rows: int, width: float, delta: float) -> None:
    if rows < 1 or width <= 0 or not 0 < delta <= 1:
        raise InvalidUsage(f"{rows} rows, a width of {width}, delta {delta}; expected at least one "
                           "row, a positive width, and delta in (0, 1]")  # fmt: skip


def round_randomly(
    fractional: NDArray[np.float64], factor: float, tries: int, random: np.random.Generator
) -> NDArray[np.int64]:
    """Rounds ``factor * fractional`` up or down by chance, a row for each try.

    The mean of each number is the number.
    """
    scaled = factor * fractional
    # What the solver left of an integer is not rounded up by chance.
    floor = np.floor(scaled + 1e-9)
    part = np.maximum(scaled - floor, 0.0)
    up: NDArray[np.bool_] = random.random((tries, len(scaled))) < part
    return (floor + up).astype(np.int64)
