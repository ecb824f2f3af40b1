"""Statistics that assume nothing about how times are distributed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Ratio:
    """Median of paired ratios, with an interval for the median.

    Attributes:
        median: of ``a[i] / b[i]``.
        low, high: the median of all ratios that could have been measured lies between them.
        confidence: with this probability or a higher one.
        count: pairs.
    """

    median: float
    low: float
    high: float
    confidence: float
    count: int

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def paired_ratio(a: Sequence[float], b: Sequence[float], confidence: float = 0.95) -> Ratio:
    """How ``a`` relates to ``b``, from measurements taken in the same turns.

    The interval is that of the sign test: order statistics of the ratios, whatever their
    distribution. With fewer than 6 pairs it is the whole range, at a lower confidence.

    Source:
        Conover, "Practical Nonparametric Statistics", 3.2: confidence interval for a quantile.
    """
    ratios = sorted(x / y for x, y in zip(a, b, strict=True))
    count = len(ratios)
    cut = _left_out(count, confidence)
    return Ratio(
        median=statistics.median(ratios),
        low=ratios[cut - 1],
        high=ratios[count - cut],
        confidence=1 - 2 * _at_most(cut - 1, count),
        count=count,
    )


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Interval of the median of a sample, by the sign test; see `paired_ratio`."""
    ordered = sorted(values)
    cut = _left_out(len(ordered), confidence)
    return ordered[cut - 1], ordered[-cut]


def _left_out(count: int, confidence: float) -> int:
    """The interval leaves out one value fewer than this at either end."""
    cut = 1
    while cut < (count + 1) // 2 and 2 * _at_most(cut, count) <= 1 - confidence:
        cut += 1
    return cut


def _at_most(heads: int, tosses: int) -> float:
    """Probability of so few heads, a fair coin given."""
    return sum(math.comb(tosses, k) for k in range(heads + 1)) / 2**tosses
