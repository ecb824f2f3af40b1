"""A figure with its interval, and the verdict that a bound gives."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.results_page.documents import Document

MET, MISSED, OPEN = "met", "**missed**", "not to be told apart"


@dataclass(frozen=True)
class Figure:
    """What was measured.

    Attributes:
        low, high: interval at 95 % (sign test); equal to the figure for a count or an extreme.
        source: the file that it was computed from.
    """

    value: float
    low: float
    high: float
    source: Document


@dataclass(frozen=True)
class Bound:
    """The limit of a target: at most, or at least, ``value``."""

    value: float
    at_most: bool = True

    def verdict(self, figure: Figure) -> str:
        """Met or missed if the whole interval lies on one side of the limit."""
        sign = 1 if self.at_most else -1
        limit = sign * self.value
        best, worst = sorted((sign * figure.low, sign * figure.high))
        if worst <= limit:
            return MET
        return MISSED if best > limit else OPEN

    def __str__(self) -> str:
        return f"{'at most' if self.at_most else 'at least'} {self.value:g}"
