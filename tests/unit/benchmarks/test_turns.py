"""What the runner keeps of systems that take turns, and that only one of them is awake."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from benchmarks.runner.fleet import Fleet  # noqa: E402
from benchmarks.runner.turns import Measured, measure_in_turns, turns  # noqa: E402


class TwoRanks:
    """A fleet whose second rank ends each step last, later by each turn."""

    awake_now: list[TwoRanks] = []  # noqa: RUF012  (of all fleets)

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        self.awake_now.append(self)
        yield
        self.awake_now.remove(self)

    def __call__(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        assert self.awake_now == [self]
        self.asked.append({"do": do, **arguments})
        turn_s = float(len(self.asked))
        ends = [step * turn_s for step in range(arguments["count"] + 1)]
        early = {"ends": [end - 0.1 for end in ends], "cpu_s": 1.0, "sent_bytes": 10.0}
        late = {"ends": ends, "cpu_s": 2.0, "sent_bytes": 30.0, "threads": 4}
        return [early, late]


def test_everyone_has_one_turn_a_round_and_nobody_is_always_first() -> None:
    order = list(turns(["a", "b", "c"], 6))
    for number in range(6):
        assert {name for round_, name in order if round_ == number} == {"a", "b", "c"}
    firsts = [next(name for round_, name in order if round_ == number) for number in range(6)]
    assert set(firsts) == {"a", "b", "c"}


def test_of_each_turn_the_last_ranks_steps_count() -> None:
    fleets = {"a": TwoRanks(), "b": TwoRanks()}
    measured = {name: Measured(note="chosen") for name in fleets}
    seen: list[tuple[int, str]] = []
    measure_in_turns(
        cast("dict[str, Fleet]", fleets), measured, rounds=2, steps=3, warm_up=1,
        before=lambda number, name: seen.append((number, name)),
    )  # fmt: skip
    assert seen == list(turns(["a", "b"], 2))
    assert fleets["a"].asked[0] == {"do": "steps", "job": "a", "count": 3, "warm_up": 1}
    one = measured["a"]
    assert one.turns == [pytest.approx([1.0] * 3), pytest.approx([2.0] * 3)]
    assert one.step_s == pytest.approx(1.5)
    assert (one.cpu_s, one.sent_bytes, one.threads) == ([3.0, 3.0], [30.0, 30.0], [0, 4])
    kept = one.to_json()
    assert kept["note"] == "chosen"
    assert len(kept["seconds"]) == 6
