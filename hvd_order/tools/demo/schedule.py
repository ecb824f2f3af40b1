"""Interleaved blocks of steps of both systems, so that both meet the same conditions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

Purpose = Literal["warm-up", "timed", "recorded"]


@dataclass(frozen=True)
class StepBlock:
    """A run of steps by one system.

    Attributes:
        system: 0 or 1, which of the two.
        first, last: training steps, ``last`` not included.
        purpose: whether its time counts; recording a timeline and warming up do not.
    """

    system: int
    first: int
    last: int
    purpose: Purpose


def interleaved_blocks(steps: int, *, block: int, recorded: int) -> Iterator[StepBlock]:
    """Both systems through steps 0 to ``steps``, in turns: A B, B A, A B, ...

    The order within a pair alternates, so that a machine that slowly speeds up or slows down
    favours neither. The first pair warms up, the last is for the timeline.

    Args:
        steps: training steps of each system.
        block: steps a turn.
        recorded: steps of the last turn.
    """
    cuts = [*range(0, steps - recorded, block), steps - recorded, steps]
    for pair, (first, last) in enumerate(pairwise(cuts)):
        purpose: Purpose = "timed"
        if last == steps:
            purpose = "recorded"
        elif pair == 0 or last - first < block:
            purpose = "warm-up"
        for turn in (0, 1):
            yield StepBlock((pair + turn) % 2, first, last, purpose)


def step_times(blocks: Sequence[StepBlock], seconds: Sequence[float]) -> list[list[float]]:
    """Milliseconds a step in each timed block, a list for each of the two systems.

    Args:
        blocks: as they were trained.
        seconds: how long each of them took.
    """
    times: list[list[float]] = [[], []]
    for block, took in zip(blocks, seconds, strict=True):
        if block.purpose == "timed":
            times[block.system].append(1e3 * took / (block.last - block.first))
    return times
