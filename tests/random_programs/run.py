"""Runs one program and says how it went, or looks for programs that fail.

``PYTHONPATH=.:tests python tests/random_programs/run.py "perceptron adam | | zero backward step"``
carries it out. ``--survey 300 --seed 5`` runs those of the seeds 5 to 304 and prints those that are
not equal, failures made as short as they get; ``--each`` tries every action by itself.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from helpers.ranks import RankPool
from random_programs.actions import ACTIONS
from random_programs.program import Program, program_from, program_of
from random_programs.runner import Verdict, judge
from random_programs.shrink import shortest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", nargs="?")
    parser.add_argument("--survey", type=int, default=0, help="how many programs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--each", action="store_true", help="every action in a plain program")
    parser.add_argument("--without", default="", help="actions to leave out, with commas")
    parser.add_argument("--at-once", action="store_true", help="without deferred updates")
    parser.add_argument("--split", action="store_true", help="with split all-reduces")
    options = parser.parse_args()
    pools: dict[int, RankPool] = {}

    def judge_one(program: Program) -> Verdict:
        how = (
            *program.setup.options,
            *(name for name in ("at_once", "split") if getattr(options, name)),
        )
        if how != program.setup.options:
            program = replace(program, setup=replace(program.setup, options=how))
        return judge(ranks, program)

    def ranks(size: int) -> RankPool:
        return pools.setdefault(size, RankPool(size))

    try:
        if options.each:
            for chosen in ACTIONS.values():
                program = program_of(chosen)
                verdict = judge_one(program)
                print(f"{verdict.kind}: {program}\n    {verdict.text}\n", flush=True)
        elif options.program:
            program = Program.parse(options.program)
            print(program.listing())
            print(judge_one(program))
        else:
            without = set(options.without.split(","))
            seeds = range(options.seed, options.seed + options.survey)
            survey(judge_one, seeds, not options.no_shrink, without)
    finally:
        for pool in pools.values():
            pool.close()


def survey(
    judge_one: Callable[[Program], Verdict], seeds: range, shrink: bool, without: set[str]
) -> None:
    kinds: Counter[str] = Counter()
    known: dict[str, set[str]] = {}
    begun = time.monotonic()
    for seed in seeds:
        program = leave_out(program_from(seed), without)
        verdict = judge_one(program)
        kinds[verdict.kind] += 1
        if kinds.total() % 25 == 0:
            print(f"{dict(kinds)}, {time.monotonic() - begun:.0f} s", flush=True)
        if verdict.kind == "equal":
            continue
        words = unusual(program)
        if verdict.kind == "FAILED" and shrink:
            like = next((line for line, some in known.items() if some <= words), None)
            if like is not None:
                print(f"{seed} FAILED, perhaps as [{like}]: {program}\n", flush=True)
                continue
            print(f"{seed} as drawn: {program}\n    {verdict.text[:300]}\n", flush=True)
            program, verdict = shortest(judge_one, program, verdict)
            known[str(program)] = unusual(program)
        print(f"{seed} {verdict.kind}: {program}\n    {verdict.text[:6000]}\n", flush=True)
    print(f"{dict(kinds)}, {time.monotonic() - begun:.0f} s")


def leave_out(program: Program, names: set[str]) -> Program:
    first, *steps = (
        tuple(call for call in calls if call.name not in names)
        for calls in (program.first, *program.steps)
    )
    return Program(program.setup, first, tuple(steps))


def unusual(program: Program) -> set[str]:
    """The words of a program that not every program has."""
    calls = {call.name for step in (program.first, *program.steps) for call in step}
    setup = program.setup
    return (calls | {setup.model, setup.optimizer, *setup.options}) - {
        "zero", "backward", "step", "perceptron", "sgd",
    }  # fmt: skip


if __name__ == "__main__":
    main()
