"""Random training programs on two ranks against one process: equal in every bit, or an error.

A program that ends in an error counts as right only if all ranks raise one that the documentation
names, and few may do so. What failed once stands in ``kept.txt`` and is tried every time.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.property_cases import cases
from helpers.ranks import RankFactory
from hypothesis import given
from random_programs.actions import ACTIONS
from random_programs.program import Program, program_from, programs
from random_programs.runner import Verdict, judge
from random_programs.shrink import shortest

KEPT = Path(__file__).with_name("kept.txt")
RACES = 10  # runs of a program whose threads may meet in many ways
QUICK = range(100_050, 100_110)  # seeds of the programs in `make test`: they have every action
CODED = range(100_000, 100_020)
MOST_ERRORS = 0.05  # share of programs that may end in an error


def kept_programs() -> list[str]:
    lines = KEPT.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def explain(program: Program, verdict: Verdict) -> str:
    return (
        f"{verdict.text}\n\n{program.listing()}\n\nAgain, from the repository's root:\n"
        f'PYTHONPATH=.:tests python tests/random_programs/run.py "{program}"'
    )


class Checked:
    """Programs that were tried."""

    def __init__(self, ranks: RankFactory) -> None:
        self._ranks = ranks
        self._tally: Counter[str] = Counter()

    def check(self, program: Program) -> None:
        verdict = judge(self._ranks, program)
        self._tally[verdict.kind] += 1
        if verdict.kind == "FAILED":
            text = explain(*shortest(lambda less: judge(self._ranks, less), program, verdict))
            raise AssertionError(f"drawn: {program}\n{text}")

    def end(self, record_property: Callable[[str, object], None]) -> None:
        """Checks that few have ended in an error."""
        for kind, number in self._tally.items():
            record_property(kind, number)
        print(dict(self._tally))
        assert self._tally["equal"] >= (1 - MOST_ERRORS) * self._tally.total(), self._tally


@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", ["plain", "in codes"])
def test_random_programs(
    ranks: RankFactory, record_property: Callable[[str, object], None], how: str
) -> None:
    """In codes, no process computes the same: ranks agree in every bit."""
    checked = Checked(ranks)
    for seed in QUICK if how == "plain" else CODED:
        program = program_from(seed)
        checked.check(program if how == "plain" else program.in_codes())
    checked.end(record_property)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("hundred", range(20))
def test_a_hundred_random_programs(
    ranks: RankFactory, record_property: Callable[[str, object], None], hundred: int
) -> None:
    checked = Checked(ranks)
    for seed in range(100 * hundred, 100 * (hundred + 1)):
        checked.check(program_from(seed))
    checked.end(record_property)


@pytest.mark.parametrize("line", kept_programs())
def test_what_failed_once(ranks: RankFactory, line: str) -> None:
    program = Program.parse(line)
    for _ in range(RACES if "read_while_training" in line else 1):
        verdict = judge(ranks, program)
        assert verdict.kind == "equal", explain(program, verdict)


def test_make_test_has_every_action() -> None:
    """So that no test elsewhere has to repeat one."""
    tried = [*kept_programs(), *(str(program_from(seed)) for seed in QUICK)]
    assert len(ACTIONS) >= 200
    assert set(ACTIONS) <= set(re.findall(r"[a-z_]+", " ".join(tried)))


def test_a_program_can_be_written_down_and_read() -> None:
    @cases(100)
    @given(program=programs())
    def check(program: Program) -> None:
        assert Program.parse(str(program)) == program

    check()
