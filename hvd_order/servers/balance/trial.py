"""An assignment on trial: it stays if step times support it, else the previous one returns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from statistics import fmean, stdev

__all__ = ["RebalanceTrial", "TrialVerdict"]

_ERRORS = 3  # standard errors; a smaller difference is noise
_MORE_ERRORS = 4  # for probes: they are many, and each could win by chance
_LITTLE = 0.01  # of a step; a smaller difference does not matter
_TOO_SLOW = 1.5  # times slower: ends the trial early


class TrialVerdict(Enum):
    """Result of a trial."""

    KEEP = "keep"
    ROLL_BACK = "roll back"


class RebalanceTrial:
    """Compares the steps after a change with those before.

    Attributes:
        owner: owners of the slices before the change.
        probe: whether the change was a probe. A probe stays only if steps are clearly faster. A
            correction, which measurements support, stays unless steps are clearly slower.
        expected_s: mean step time before the change.
        news: whether a server's speed estimate has changed during the trial.
    """

    def __init__(
        self, owner: Sequence[int], before_s: Sequence[float], steps: int, probe: bool
    ) -> None:
        """Starts a trial of ``steps`` steps; ``before_s``: the last step times, at least one."""
        self.owner = tuple(owner)
        self.probe = probe
        self.news = False
        self.expected_s = fmean(before_s)
        self._before_s = list(before_s)
        self._steps = steps
        self._after_s: list[float] = []

    def too_slow(self, step_s: float) -> bool:
        """Returns whether one step is enough to end a probe."""
        return self.probe and step_s > _TOO_SLOW * self.expected_s

    def step(self, step_s: float) -> TrialVerdict | None:
        """Adds a step after the change; returns the verdict after the last one."""
        self._after_s.append(step_s)
        if len(self._after_s) < self._steps:
            return None
        difference_s = fmean(self._after_s) - self.expected_s
        noise_s = math.hypot(_error(self._before_s), _error(self._after_s))
        errors = _MORE_ERRORS if self.probe else _ERRORS
        clear_s = max(_LITTLE * self.expected_s, errors * noise_s)
        good = difference_s < -clear_s if self.probe else difference_s <= clear_s
        return TrialVerdict.KEEP if good else TrialVerdict.ROLL_BACK


def _error(values: Sequence[float]) -> float:
    """Standard error of the mean."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
