"""Guesses about better assignments: which, when, and what they may cost."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

__all__ = ["STEPS", "Exploration"]

STEPS = 8
"""Of a probe, that are measured."""

_FIRST = 1 / 50  # probability of a probe in a quiet step; halved by each that fails
_LAST = 1 / 2000  # but not below
_PRICE = 0.01  # of all time may be lost to probes
_CUT_SHORT = 2  # steps of a probe that turns out to be very slow
_SMALL = 0.1  # of its server's bytes is what a probe moves


class Exploration:
    """Says when to probe, and what.

    Time lost to probes is counted, and a probe that by all that is known would make it more than
    1 % of the total has to wait.
    """

    def __init__(self, seed: int) -> None:
        """``seed``: of all that is left to chance."""
        self._random = random.Random(seed)
        self._probability = _FIRST
        self._total_s = 0.0
        self._lost_s = 0.0

    def step(self, step_s: float, lost_s: float = 0.0) -> None:
        """A step has ended. ``lost_s``: by so much a probe has made it longer."""
        self._total_s += step_s
        self._lost_s += max(0.0, lost_s)

    def found(self) -> None:
        """Servers are not what they were, so there may be something to find."""
        self._probability = _FIRST

    def failed(self) -> None:
        """A probe was no good: fewer from now on."""
        self._probability = max(self._probability / 2, _LAST)

    def is_time(self) -> bool:
        """Whether this step should be followed by a probe."""
        return self._random.random() < self._probability

    def affordable(self, step_s: float, predicted_s: float) -> bool:
        """Whether a probe with steps of ``predicted_s`` instead of ``step_s`` may be made."""
        more_s = max(0.0, predicted_s - step_s)
        # Steps that are half as long again end a probe; see Trial.too_slow.
        lost_s = STEPS * more_s if more_s < step_s / 2 else _CUT_SHORT * more_s + STEPS * step_s / 2
        return self._lost_s + lost_s <= _PRICE * self._total_s

    def guess(
        self, owner: Sequence[int], sizes: Sequence[int], speeds: Mapping[int, float]
    ) -> tuple[int, ...]:
        """New owners: a small slice of the slowest server goes elsewhere.

        To a server that has nothing, if there is one: nothing else would tell of its recovery.

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
