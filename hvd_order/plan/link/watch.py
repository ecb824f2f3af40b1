"""Notices that steps no longer take what they took when the cut was chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

__all__ = ["Drift", "Watch"]

INTERVAL_S = 30.0  # between two looks
LEAST_STEPS = 100  # as well
_SEEN = 25  # steps of each look
_WARM_UP = 3  # steps after a change that still feel what was before
_CLEAR = 1.2  # times slower or faster than before
_TIMES = 2  # in a row


@dataclass(frozen=True)
class Drift:
    """Steps took ``before_s`` when the choice was made, and take ``now_s``."""

    before_s: float
    now_s: float


class Watch:
    """Looks at some steps now and then. The same on every rank, if fed the same.

    The ranks compare what they have seen after the same steps, twice a minute at most, and a change
    counts when it is clear and seen twice in a row. Between two looks a step costs a comparison of
    two integers.
    """

    def __init__(self, step_s: float, patience: int = 1, expected: bool = True) -> None:
        """Begins with the next step.

        Args:
            step_s: measured with the choice; the same on all ranks.
            patience: so many times the usual interval between two looks.
            expected: ``step_s`` is what steps are held against; if not, it is a few steps' account
                that the first look, right away, replaces.
        """
        self._every = patience * max(LEAST_STEPS, round(INTERVAL_S / step_s))
        self._expected_s = step_s if expected else None
        self._left = _SEEN + _WARM_UP if not expected else self._every  # until the ranks compare
        self._last_s = 0.0
        self._seconds: list[float] = []
        self._odd = 0  # how often in a row steps were slower, or if negative faster

    def step_taken(self, now_s: float) -> float | None:
        """A step has ended.

        Args:
            now_s: any clock.

        Returns:
            When the ranks compare: the median of this rank's last steps.
        """
        self._left -= 1
        if self._left > _SEEN:
            return None
        if self._left < _SEEN:
            self._seconds.append(now_s - self._last_s)
        self._last_s = now_s
        if self._left:
            return None
        seen_s = median(self._seconds)
        self._seconds.clear()
        self._left = self._every
        return seen_s

    def compared(self, medians_s: Sequence[float]) -> Drift | None:
        """What all ranks have seen, of which the slowest counts.

        Returns:
            A change, if it is clear and lasts.
        """
        now_s = max(medians_s)
        if self._expected_s is None:
            self._expected_s = now_s
            return None
        ratio = now_s / self._expected_s
        side = (ratio > _CLEAR) - (ratio < 1 / _CLEAR)
        self._odd = self._odd + side if self._odd * side > 0 else side
        return Drift(self._expected_s, now_s) if abs(self._odd) >= _TIMES else None

    @property
    def expected_s(self) -> float | None:
        """What steps are held against; None before the first look."""
        return self._expected_s
