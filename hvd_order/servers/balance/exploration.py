"""Probes for better assignments: their choice, time and cost."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

__all__ = ["STEPS", "Exploration"]

STEPS = 8
"""Number of measured steps of a probe."""

_FIRST = 1 / 50  # probability of a probe in a quiet step; each failed probe halves it
_LAST = 1 / 2000  # but not below
_PRICE = 0.01  # share of all time that probes may cost
_CUT_SHORT = 2  # steps of a probe that proves very slow
_SMALL = 0.1  # of its server's bytes: the most that a random probe moves


class Exploration:
    """Decides when to probe, and what.

    Counts the time lost to probes. A probe whose predicted cost would raise that time above 1 % of
    the total has to wait.
    """

    def __init__(self, seed: int) -> None:
        """Creates the object; ``seed`` determines all random choices."""
        self._random = random.Random(seed)
        self._probability = _FIRST
        self._total_s = 0.0
        self._lost_s = 0.0

    def step(self, step_s: float, lost_s: float = 0.0) -> None:
        """Counts a finished step; a probe made it longer by ``lost_s``."""
        self._total_s += step_s
        self._lost_s += max(0.0, lost_s)

    def found(self) -> None:
        """Makes probes frequent again, because servers have changed."""
        self._probability = _FIRST

    def failed(self) -> None:
        """Makes probes rarer after a failed one."""
        self._probability = max(self._probability / 2, _LAST)

    def is_time(self) -> bool:
        """Returns whether to probe after this step."""
        return self._random.random() < self._probability

    def affordable(self, step_s: float, predicted_s: float) -> bool:
        """Returns whether a probe may lengthen steps from ``step_s`` to ``predicted_s``."""
        more_s = max(0.0, predicted_s - step_s)
        # A step half as long again ends a probe; see RebalanceTrial.too_slow.
        lost_s = STEPS * more_s if more_s < step_s / 2 else _CUT_SHORT * more_s + STEPS * step_s / 2
        return self._lost_s + lost_s <= _PRICE * self._total_s

    def guess(
        self, owner: Sequence[int], sizes: Sequence[int], speeds: Mapping[int, float]
    ) -> tuple[int, ...]:
        """Returns new owners: a small slice of the slowest server goes to another server.

        It goes to a server without slices, if there is one: nothing else would show its recovery.

        Args:
            owner: by slice; there is at least one.
            sizes: bytes by slice.
            speeds: bytes a second by server, of at least two.
        """
        held: dict[int, list[int]] = {server: [] for server in speeds}
        for i, server in enumerate(owner):
            held[server].append(i)
        loads = {server: sum(sizes[i] for i in mine) for server, mine in held.items()}
        donor = max(speeds, key=lambda server: loads[server] / speeds[server])
        idle = [server for server, mine in held.items() if not mine]
        small = [i for i in held[donor] if sizes[i] <= _SMALL * loads[donor]]
        if idle or not small:
            moved = min(held[donor], key=lambda i: sizes[i])
        else:
            moved = self._random.choice(small)
        after = list(owner)
        after[moved] = self._random.choice(idle or [each for each in speeds if each != donor])
        return tuple(after)
