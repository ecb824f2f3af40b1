"""An assignment on trial: it stays if steps say so, else the one before comes back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from statistics import fmean, stdev

__all__ = ["Trial", "Verdict"]

_ERRORS = 3  # standard errors; less is noise
_MORE_ERRORS = 4  # for guesses: there are many, and each could win by chance
_LITTLE = 0.01  # of a step; less is not worth a word
_TOO_SLOW = 1.5  # times slower: no need to wait for the end


class Verdict(Enum):
    """How a trial ended."""

    KEEP = "keep"
    ROLL_BACK = "roll back"


class Trial:
    """Compares steps after a change with those before.

    Attributes:
        owner: who had the slices before.
        probe: whether the change was a guess. A guess stays only if steps are clearly faster; a
            correction, that measurements have asked for, unless they are clearly slower.
        expected_s: a step before.
        news: whether a server has turned out to be other than was known.
    """

    def __init__(
        self, owner: Sequence[int], before_s: Sequence[float], steps: int, probe: bool
    ) -> None:
        """``before_s``: the last steps as they were, at least one; ``steps``: to look at."""
        self.owner = tuple(owner)
        self.probe = probe
        self.news = False
        self.expected_s = fmean(before_s)
        self._before_s = list(before_s)
        self._steps = steps
        self._after_s: list[float] = []

    def too_slow(self, step_s: float) -> bool:
        """Whether one step is enough to end a guess."""
        return self.probe and step_s > _TOO_SLOW * self.expected_s

    def step(self, step_s: float) -> Verdict | None:
        """Takes in a step after the change; in the end says how it went."""
        self._after_s.append(step_s)
        if len(self._after_s) < self._steps:
            return None
        difference_s = fmean(self._after_s) - self.expected_s
        noise_s = math.hypot(_error(self._before_s), _error(self._after_s))
        errors = _MORE_ERRORS if self.probe else _ERRORS
        clear_s = max(_LITTLE * self.expected_s, errors * noise_s)
        good = difference_s < -clear_s if self.probe else difference_s <= clear_s
        return Verdict.KEEP if good else Verdict.ROLL_BACK


def _error(values: Sequence[float]) -> float:
    """Standard error of the mean."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
