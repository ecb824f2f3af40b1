"""Who is measured when: rivals take turns, so that all of them meet the same machine."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.runner.commands import step_s
from benchmarks.runner.fleet import Fleet


def turns(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Rounds of one turn each: A B C, C B A, B C A, A C B, ...

    A machine that slowly speeds up or slows down favours nobody. The order depends on the round
    alone: all ranks take the same turns.
    """
    for number in range(rounds):
        shift = number // 2 % len(names)
        order = [*names[shift:], *names[:shift]]
        for name in order if number % 2 == 0 else reversed(order):
            yield number, name


def take_turns(
    names: Iterable[str],
    measure: Callable[[str], Sequence[float]],
    rounds: int,
    warm_up: int = 0,
) -> dict[str, list[float]]:
    """What each turn of each system measured, one after the other.

    Args:
        warm_up: rounds before, which are not kept.
    """
    values: dict[str, list[float]] = {name: [] for name in names}
    for number, name in turns(list(values), warm_up + rounds):
        measured = measure(name)
        if number >= warm_up:
            values[name] += measured
    return values


@dataclass
class Measured:
    """One system, turn by turn.

    Attributes:
        turns: every measured step of each turn, from when the last rank has ended one until the
            last has ended the next.
        cpu_s: processor time a step, all ranks together.
        sent_bytes: that left the busiest host, a step.
        switches, messages: of context and of the order agreement, a step, all ranks together.
        threads: of each rank, in the last turn.
        note: settings that the system chose.
    """

    note: str = ""
    turns: list[list[float]] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    sent_bytes: list[float] = field(default_factory=list)
    switches: list[float] = field(default_factory=list)
    messages: list[float] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        """The steps of all turns."""
        return [step for turn in self.turns for step in turn]

    @property
    def step_s(self) -> float:
        """The median step."""
        return statistics.median(self.seconds)

    def add(self, answers: Sequence[dict[str, Any]]) -> None:
        """Adds a turn: what the ranks answered to "steps"; TensorFlow's do not count all."""
        self.turns.append(step_s(answers))
        self.cpu_s.append(sum(answer["cpu_s"] for answer in answers))
        self.sent_bytes.append(max(answer["sent_bytes"] for answer in answers))
        self.switches.append(sum(answer.get("switches", 0) for answer in answers))
        self.messages.append(sum(answer.get("messages", 0) for answer in answers))
        self.threads = [answer.get("threads", 0) for answer in answers]

    def to_json(self) -> dict[str, Any]:
        """What the result file of a cell keeps."""
        return {"seconds": self.seconds, "cpu_s": self.cpu_s, "sent_bytes": self.sent_bytes,
                "note": self.note}  # fmt: skip


def measure_in_turns(
    jobs: Mapping[str, Fleet],
    measured: Mapping[str, Measured],
    rounds: int,
    steps: int,
    warm_up: int,
    before: Callable[[int, str], None] = lambda number, name: None,
) -> None:
    """Every system's steps; its ranks are awake in its own turns alone.

    Args:
        jobs: built ones, by name, and the ranks that have them.
        before: called before each turn.
    """
    for number, name in turns(list(jobs), rounds):
        before(number, name)
        with jobs[name].awake():
            measured[name].add(jobs[name]("steps", job=name, count=steps, warm_up=warm_up))
