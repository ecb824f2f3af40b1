"""Detects that step times have changed since the slice settings were chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

__all__ = ["Drift", "DriftDetector"]

INTERVAL_S = 30.0  # between two measurements
LEAST_STEPS = 100  # least number of steps between two measurements
_SEEN = 25  # steps of each measurement
_WARM_UP = 3  # steps after a change that the previous state still affects
_CLEAR = 1.2  # times slower or faster than before
_TIMES = 2  # in a row


@dataclass(frozen=True)
class Drift:
    """Steps took ``before_s`` when the choice was made, and take ``now_s``.

    Attributes:
        late: slices are late in the planned order more often than before.
    """

    before_s: float
    now_s: float
    late: bool = False


class DriftDetector:
    """Measures some steps now and then. Equal input gives equal results on all ranks.

    The ranks compare what they have seen after the same steps, at most twice a minute. A change
    counts if it is clear and found twice in a row: of the step time, or of the hold-ups of a
    planned order, which a late rank or another order of the model causes. Between two measurements
    a step costs a comparison of two integers.
    """

    def __init__(self, step_s: float, patience: int = 1, expected: bool = True) -> None:
        """Starts with the next step.

        Args:
            step_s: step time measured with the chosen settings; the same on all ranks.
            patience: factor on the usual interval between two measurements.
            expected: whether ``step_s`` is the reference. If not, it is an estimate from a few
                steps, which an immediate first measurement replaces.
        """
        self._every = patience * max(LEAST_STEPS, round(INTERVAL_S / step_s))
        self._expected_s = step_s if expected else None
        self._left = _SEEN + _WARM_UP if not expected else self._every  # until the ranks compare
        self._last_s = 0.0
        self._seconds: list[float] = []
        self._hold_ups: float | None = None  # a step, when the choice was new
        self._odd = 0  # times in a row that steps were slower, or if negative faster

    def step_taken(self, now_s: float) -> float | None:
        """Records the end of a step.

        Args:
            now_s: time of any clock.

        Returns:
            The median of this rank's last steps if the ranks have to compare, else None.
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

    def compared(self, medians_s: Sequence[float], hold_ups: float = 0.0) -> Drift | None:
        """Takes what all ranks have seen.

        Args:
            medians_s: step times; the slowest counts.
            hold_ups: slices a step that were late in a planned order while another was ready, on
                the rank that had most.

        Returns:
            A change that is clear and lasts, else None.
        """
        now_s = max(medians_s)
        if self._hold_ups is None:
            self._hold_ups = hold_ups
        if self._expected_s is None:
            self._expected_s = now_s
            return None
        ratio = now_s / self._expected_s
        late = hold_ups > _CLEAR * self._hold_ups + 1
        side = (ratio > _CLEAR or late) - (ratio < 1 / _CLEAR and not late)
        self._odd = self._odd + side if self._odd * side > 0 else side
        return Drift(self._expected_s, now_s, late) if abs(self._odd) >= _TIMES else None

    @property
    def expected_s(self) -> float | None:
        """Reference step time; None before the first measurement."""
        return self._expected_s
