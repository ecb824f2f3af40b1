"""A mean over random runs, and how far it can be trusted."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Mean", "mean_of"]


@dataclass(frozen=True)
class Mean:
    """A mean.

    Attributes:
        half: half the width of its interval at 95 %; None: one value has none.
    """

    value: float
    half: float | None


def mean_of(values: Sequence[float]) -> Mean:
    """Mean of independent values, with its interval by Student's t; nan if a value is nan."""
    if len(values) == 1 or any(math.isnan(value) for value in values):
        return Mean(math.fsum(values) / len(values), None)
    from scipy.special import stdtrit

    error = statistics.stdev(values) / math.sqrt(len(values))
    return Mean(statistics.fmean(values), float(stdtrit(len(values) - 1, 0.975)) * error)
