"""Makes a failing program as short as it gets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from random_programs.program import Call, Program
from random_programs.runner import Verdict
from random_programs.world import Setup


def shortest(
    judge_one: Callable[[Program], Verdict], program: Program, verdict: Verdict
) -> tuple[Program, Verdict]:
    """Leaves out what can be left out, as long as the program still fails."""
    slow = "hang" in verdict.text
    tried: set[str] = set()
    going = True
    deadline = time.monotonic() + (240 if slow else 60)
    while going:
        going = False
        for smaller in _smaller(program):
            if str(smaller) in tried:
                continue
            if time.monotonic() > deadline:
                return program, verdict
            tried.add(str(smaller))
            other = judge_one(smaller)
            if other.kind == "FAILED":
                program, verdict, going = smaller, other, True
                break
    return program, verdict


def _smaller(program: Program) -> Iterator[Program]:
    setup, first, steps = program.setup, program.first, program.steps
    for i in reversed(range(len(steps))):
        if len(steps) > 1:
            yield Program(setup, first, steps[:i] + steps[i + 1 :])
    if setup.options:
        yield Program(Setup(setup.model, setup.optimizer), first, steps)
    if setup.model != "perceptron":
        yield Program(Setup("perceptron", setup.optimizer, setup.options), first, steps)
    if setup.optimizer != "sgd":
        yield Program(Setup(setup.model, "sgd", setup.options), first, steps)
    plain = tuple(map(Call, ("zero", "backward", "step")))
    for i in range(len(steps)):
        if steps[i] != plain:
            yield Program(setup, first, (*steps[:i], plain, *steps[i + 1 :]))
    for i in reversed(range(len(first))):
        yield Program(setup, first[:i] + first[i + 1 :], steps)
    for i in range(len(steps)):
        for j, call in enumerate(steps[i]):
            if call.name not in ("zero", "backward", "step"):
                rest = (*steps[i][:j], *steps[i][j + 1 :])
                yield Program(setup, first, (*steps[:i], rest, *steps[i + 1 :]))
