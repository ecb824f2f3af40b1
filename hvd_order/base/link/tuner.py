"""Tries several slice settings on real steps, and keeps the fastest.

Two parts:

1. A *race* of three rounds, two if steps are long. Each candidate gets a turn of a few steps, or
   two in the first round if steps are short: the first steps of a process are slower, and a pause
   of the machine is longer than such a turn. Candidates that are far slower than the fastest leave
   after the first round, and slower ones after the second. The order of the turns is reversed from
   round to round, so that a machine that gets slower favours nobody.
2. *Duels* of the fastest candidate: with the first candidate, and with the fastest of those that
   wait for all gradients in ``step()``, as DistributedDataParallel does. The turns alternate. A
   sequential test counts which of the two wins more pairs of turns. Unless the challenger wins, the
   other one stays. So chance cannot choose what is slower than the first candidate or than
   DistributedDataParallel. No duel is needed if the fastest candidate waits itself.

The score of a candidate is the lower median of its turns, on the slowest rank: what disturbs a
turn makes it longer.

Source:
    Wald, "Sequential Tests of Statistical Hypotheses", Annals of Mathematical Statistics 16, 1945,
    for the test of a duel.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import replace
from statistics import fmean
from statistics import median_low as median

from hvd_order.base.link.slice_settings import SliceSettings, arrival_settings, bucket_settings

__all__ = ["Tuner", "candidates", "distinct"]

_WARM_UP = 2  # steps after a change that the old settings still affect
_FIRST_STEPS = 5  # of each turn in the first round
_MOST_STEPS = 20
_TURN_S = 0.25  # later turns of short steps last about so long
_SHORT_S = 0.1  # shorter steps get two turns in the first round
_LONG_S = 1.0  # longer steps vary little: fewer of them, and one round fewer
_LONG_STEPS = 3
_KEEP = ((1.25, 5), (1.12, 3))  # after each round: ratio to the fastest, number of candidates
_CLEAR = 0.85  # ratio that needs no duel if every round shows it
_WORTH = 0.98  # ratio from which on a duel is worth its steps
_BEATEN = 1.5  # ratio to the fastest at which not even a duel is needed
_WIN, _LOSS = math.log(0.85 / 0.5), math.log(0.15 / 0.5)  # evidence of one pair of turns
_PROOF = math.log(20.0)  # wrong once in 20 equal pairs
_MOST_PAIRS = 16


def candidates(
    first: SliceSettings, total_bytes: int, planned: bool, cross_iteration: bool
) -> list[SliceSettings]:
    """Settings to try, those in use first.

    Args:
        first: the link model's; split if gradients are read by their norms before ``step()``. Then
            settings that overlap with the next step without a split gain nothing.
        total_bytes: total size of all gradients.
        planned: whether a planned order is possible: one model, and summed by the ranks.
        cross_iteration: whether updates may wait for their readers.
    """
    in_flight = first.credit_bytes // first.slice_bytes
    half, double = (
        replace(first, slice_bytes=size, credit_bytes=in_flight * size)
        for size in (first.slice_bytes // 2, 2 * first.slice_bytes)
    )
    arrival = replace(arrival_settings(total_bytes), agreement=first.agreement)
    if not planned:
        return distinct([first, half, double, arrival])
    followed, late_arrival = (replace(one, agreement="planned") for one in (first, arrival))
    few, many = bucket_settings(total_bytes, few=True), bucket_settings(total_bytes, few=False)
    if not cross_iteration:  # then no order helps, only early transfers
        return distinct([few, many, replace(followed, policy="arrival", cross_iteration=False)])
    if first.split:
        return distinct([first, few, many, followed, half, double])
    late_few = replace(few, cross_iteration=True, small_front=True)
    return distinct([first, few, many, followed, late_few, half, double, late_arrival])


def distinct(choices: Sequence[SliceSettings]) -> list[SliceSettings]:
    """Drops settings that trials cannot distinguish from an earlier one."""
    kept: list[SliceSettings] = []
    for settings in choices:
        if not any(settings.resembles(other) for other in kept):
            kept.append(settings)
    return kept


class Tuner:
    """Chooses the slice settings of the next steps. Equal input gives equal choices on all ranks.

    Attributes:
        slice_settings: the settings to use now. There are none without candidates.
        done: whether the choice is made.
        chosen_s: step time of the chosen settings on the slowest rank, in seconds.
    """

    def __init__(self, choices: Sequence[SliceSettings]) -> None:
        """Takes the settings to try; the first stay in use unless others are faster."""
        self.done = not choices
        self.chosen_s = math.nan
        self._seconds: list[float] = []  # of the current turn, by step
        self._last_s: float | None = None
        self._steps = _FIRST_STEPS
        self._trials = _trials(choices)
        if choices:
            self.slice_settings, self._steps = next(self._trials)

    @property
    def is_boundary(self) -> bool:
        """Whether the next :meth:`step_taken` begins or ends the steps that count in a turn.

        Where a device is ahead of or behind the host, the caller then waits for it first.
        """
        steps = len(self._seconds) + (self._last_s is not None)
        return steps in (_WARM_UP, _WARM_UP + self._steps)

    def step_taken(self, now_s: float) -> float | None:
        """Records the end of a step.

        Args:
            now_s: time of any clock.

        Returns:
            This rank's step time in the turn if it is over, else None. A turn ends at the same step
            on all ranks; the ranks exchange their times before they call :meth:`measured`.
        """
        if self._last_s is not None:
            self._seconds.append(now_s - self._last_s)
        self._last_s = now_s
        if len(self._seconds) < _WARM_UP + self._steps:
            return None
        return _middle(self._seconds[_WARM_UP:])

    def measured(self, by_rank_s: Sequence[float]) -> SliceSettings:
        """Takes all ranks' step times of the finished turn.

        Returns:
            The settings to use from now on.
        """
        self._seconds.clear()
        self._last_s = None
        try:
            self.slice_settings, self._steps = self._trials.send(max(by_rank_s))
        except StopIteration as end:
            self.done = True
            self.slice_settings, self.chosen_s = end.value
        return self.slice_settings


def _middle(seconds: Sequence[float]) -> float:
    """The mean without the shortest and the longest fifth: a pause of the machine decides nothing,
    and short and long steps that alternate count alike.
    """
    cut = len(seconds) // 5
    return fmean(sorted(seconds)[cut : len(seconds) - cut])


_Trials = Generator[tuple[SliceSettings, int], float, tuple[SliceSettings, float]]
_Turns = dict[SliceSettings, list[float]]


def _trials(choices: Sequence[SliceSettings]) -> _Trials:
    """Yields the settings and the number of steps of each turn, and receives the step time.

    Returns:
        The choice, and its step time.
    """
    turns = yield from _race(choices)
    ranked = sorted(turns, key=lambda settings: median(turns[settings]))
    chosen = ranked[0]
    if chosen.cross_iteration:
        at_once = [settings for settings in ranked if not settings.cross_iteration]
        for champion in (*choices[:1], *at_once[:1]):
            if champion != chosen and not (yield from _wins(chosen, champion, turns)):
                chosen = champion
    return chosen, median(turns[chosen])


def _race(choices: Sequence[SliceSettings]) -> Generator[tuple[SliceSettings, int], float, _Turns]:
    """Returns the turns of the candidates that are left after the last round.

    Among them is the fastest that waits for all gradients in ``step()``, unless it is far behind.
    """
    turns: _Turns = {settings: [] for settings in choices}
    field = list(choices)
    for number in range(1 + len(_KEEP)):
        for settings in field:
            steps = _steps_of(turns[settings])
            turns[settings].append((yield settings, steps))
        if number == 0 and min(min(each) for each in turns.values()) < _SHORT_S:
            for settings in reversed(field):
                turns[settings].append((yield settings, _FIRST_STEPS))
            field.reverse()
        ranked = sorted(field, key=lambda settings: median(turns[settings]))
        if number < len(_KEEP):
            ratio, most = _KEEP[number]
            limit_s = ratio * median(turns[ranked[0]])
            left = [settings for settings in ranked if median(turns[settings]) <= limit_s][:most]
            at_once = [settings for settings in ranked if not settings.cross_iteration][:1]
            left += [
                settings
                for settings in at_once
                if median(turns[settings]) <= _BEATEN * median(turns[ranked[0]])
            ]
            field = [settings for settings in reversed(field) if settings in left]
            is_long = max(turns[ranked[0]]) > _LONG_S
            if len(field) == 1 or (number > 0 and is_long):
                break
    return {settings: turns[settings] for settings in field}


def _wins(
    challenger: SliceSettings, champion: SliceSettings, turns: _Turns
) -> Generator[tuple[SliceSettings, int], float, bool]:
    """Whether the challenger is faster: by far in every round of the race, or proven by a duel.

    Other turns of the race prove nothing: the challenger is there because it was lucky in them.
    """
    if champion not in turns:
        return True  # it left the race
    if median(turns[challenger]) > _WORTH * median(turns[champion]):
        return False
    race = zip(turns[challenger], turns[champion], strict=False)
    if all(one_s < _CLEAR * other_s for one_s, other_s in race):
        return True
    evidence = 0.0
    for number in range(_MOST_PAIRS):
        pair = (challenger, champion) if number % 2 else (champion, challenger)
        for settings in pair:
            turns[settings].append((yield settings, _steps_of(turns[settings])))
        evidence += _WIN if turns[challenger][-1] < turns[champion][-1] else _LOSS
        if abs(evidence) >= _PROOF:
            break
    return evidence >= _PROOF


def _steps_of(turns: Sequence[float]) -> int:
    """Number of steps of the next turn: more if steps are short, whose times vary more."""
    if not turns:
        return _FIRST_STEPS
    if turns[-1] > _LONG_S:
        return _LONG_STEPS
    return min(max(round(_TURN_S / turns[-1]), _FIRST_STEPS), _MOST_STEPS)
