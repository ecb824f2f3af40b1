"""Tries several slice settings on a few real steps each, and keeps the fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvd_order.plan.link.slice_settings import SliceSettings, arrival_settings

__all__ = ["Tuner", "Turn", "candidates", "distinct"]

_WARM_UP = 2  # steps after a change that the old settings still affect
_STEPS = 5  # measured steps of each candidate
_WORTH = 0.98  # a rival must be this much faster than the first candidate, or it is noise


@dataclass(frozen=True, order=True)
class Turn:
    """Step times of one candidate, in seconds: the median and the quartiles around it."""

    median_s: float
    low_s: float
    high_s: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Turn:
        """Summarises the measured steps."""
        ordered = sorted(seconds)
        last = len(ordered) - 1
        return cls(ordered[last // 2], ordered[last // 4], ordered[last - last // 4])

    @classmethod
    def slowest(cls, turns: Sequence[Turn]) -> Turn:
        """Combines the turns of all ranks; the slowest rank counts."""
        return cls(
            max(turn.median_s for turn in turns),
            max(turn.low_s for turn in turns),
            max(turn.high_s for turn in turns),
        )

    def clearly_faster(self, other: Turn) -> bool:
        """Whether the difference exceeds the spread of both turns and is large enough to matter."""
        return self.high_s < other.low_s and self.median_s < _WORTH * other.median_s


def candidates(first: SliceSettings, total_bytes: int) -> list[SliceSettings]:
    """Settings to try besides the model's: half and twice the slice size, and arrival order.

    Args:
        total_bytes: total size of all gradients.
    """
    in_flight = first.credit_bytes // first.slice_bytes
    others = [
        SliceSettings(size, in_flight * size)
        for size in (first.slice_bytes // 2, 2 * first.slice_bytes)
    ]
    return [first, *others, arrival_settings(total_bytes)]


def distinct(choices: Sequence[SliceSettings]) -> list[SliceSettings]:
    """Drops settings that trials cannot distinguish from an earlier one."""
    kept: list[SliceSettings] = []
    for settings in choices:
        if not any(settings.resembles(other) for other in kept):
            kept.append(settings)
    return kept


class Tuner:
    """Chooses the slice settings of the next steps. Equal input gives equal choices on all ranks.

    Every candidate gets a turn. If a rival was clearly faster than the first candidate, both get
    another turn, and the rival has to win that turn as well: on a shared machine, one of several
    candidates often looks better by chance.
    """

    def __init__(self, choices: Sequence[SliceSettings]) -> None:
        """Takes the settings to try; the first stay in use unless others are clearly faster."""
        self._turns = list(choices)
        self._confirming = False
        self._seconds: list[float] = []  # of the current turn, by step
        self._over: list[Turn] = []
        self._last_s: float | None = None
        self._chosen: SliceSettings | None = None
        self._chosen_s: float | None = None

    @property
    def slice_settings(self) -> SliceSettings:
        """The settings in use. There are none without candidates."""
        return self._chosen or self._turns[len(self._over)]

    @property
    def done(self) -> bool:
        """Whether the choice is made."""
        return len(self._over) == len(self._turns)

    @property
    def chosen_s(self) -> float:
        """Median step time of the chosen settings in its last turn, on the slowest rank."""
        assert self._chosen_s is not None, "nothing has been tried to the end"
        return self._chosen_s

    def step_taken(self, now_s: float) -> Turn | None:
        """Records the end of a step.

        Args:
            now_s: time of any clock.

        Returns:
            This rank's turn if it is over, else None. The turn ends at the same step on all ranks;
            the ranks exchange their turns before they call :meth:`measured`.
        """
        if self._last_s is not None:
            self._seconds.append(now_s - self._last_s)
        self._last_s = now_s
        if len(self._seconds) < _WARM_UP + _STEPS:
            return None
        return Turn.of(self._seconds[_WARM_UP:])

    def measured(self, turns: Sequence[Turn]) -> SliceSettings:
        """Takes all ranks' measurements of the finished turn.

        Returns:
            The settings to use from now on.
        """
        self._over.append(Turn.slowest(turns))
        self._seconds.clear()
        self._last_s = None
        if self.done:
            self._choose()
        return self.slice_settings

    def _choose(self) -> None:
        first, *rivals = self._over[-2:] if self._confirming else self._over
        fastest = min(rivals, default=first)
        better = fastest.clearly_faster(first)
        if better and not self._confirming:
            rival = self._turns[self._over.index(fastest)]
            self._turns += [self._turns[0], rival]
            self._confirming = True
        else:
            self._chosen = self._turns[-1 if better else 0]
            self._chosen_s = (fastest if better else first).median_s
