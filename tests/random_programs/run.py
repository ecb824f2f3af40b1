"""Runs one program and says how it went, or looks for programs that fail.

``PYTHONPATH=.:tests python tests/random_programs/run.py "perceptron adam | | zero backward step"``
carries it out. ``--count 5000 --seed 5`` runs those of the seeds 5 to 5004 and prints those that
are not equal, failures made as short as they get; ``--each`` tries every action by itself. The exit
status is 1 if a program fails.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from helpers.ranks import RankPool
from random_programs.actions import ACTIONS
from random_programs.program import Program, program_from, program_of
from random_programs.runner import Verdict, body_ready, judge
from random_programs.shrink import shortest

JOBS = 3  # programs at a time: ranks wait for each other half of the time, two cores are busy then


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", nargs="?")
    parser.add_argument("--count", type=int, default=0, help="how many programs")
    parser.add_argument("--seed", type=int, default=0, help="of the first of them")
    parser.add_argument("--jobs", type=int, default=JOBS, help="programs at a time")
    parser.add_argument("--each", action="store_true", help="every action in a plain program")
    parser.add_argument("--only", default="", help="with --each: these actions, with commas")
    parser.add_argument("--at-once", action="store_true", help="without deferred updates")
    parser.add_argument("--split", action="store_true", help="with split all-reduces")
    parser.add_argument("--coded", action="store_true", help="with gradients in 8 bits")
    parser.add_argument("--same-rows", action="store_true", help="against plain programs alone")
    options = parser.parse_args()
    how = [name for name in ("at_once", "split", "same_rows") if getattr(options, name)]
    judges = Judges(how, options.coded)
    try:
        if options.program:
            program = judges.changed(Program.parse(options.program))
            print(program.listing())
            verdict = judges.judge(program)
            print(verdict)
            failed = verdict.kind == "FAILED"
        elif options.each:
            failed = try_each(judges, options.jobs, set(filter(None, options.only.split(","))))
        else:
            seeds = range(options.seed, options.seed + options.count)
            failed = Survey(judges).run(seeds, options.jobs)
    finally:
        judges.close()
    sys.exit(int(failed))


class Judges:
    """Judges programs, each thread on ranks of its own."""

    def __init__(self, options: list[str], coded: bool) -> None:
        """``options``: what every program says beside its own; ``coded``: in 8 bits."""
        self._options = options
        self._coded = coded
        self._mine = threading.local()
        self._pools: list[RankPool] = []
        self._starting = threading.Lock()
        self._ranks(1)  # the first pool starts what all others are forked from

    def changed(self, program: Program) -> Program:
        program = program.in_codes() if self._coded else program
        options = program.setup.options
        more = tuple(name for name in self._options if name not in options)
        return replace(program, setup=replace(program.setup, options=(*options, *more)))

    def judge(self, program: Program) -> Verdict:
        return judge(self._ranks, self.changed(program))

    def _ranks(self, size: int) -> RankPool:
        pools: dict[int, RankPool] = self._mine.__dict__.setdefault("pools", {})
        if size not in pools:
            pools[size] = RankPool(size)
            with self._starting:
                pools[size].run(body_ready)
                self._pools.append(pools[size])
        return pools[size]

    def close(self) -> None:
        for pool in self._pools:
            pool.close()


def try_each(judges: Judges, jobs: int, names: set[str]) -> bool:
    """Prints how every action does by itself, with its first and its last number."""
    programs = [
        program_of(chosen, number)
        for chosen in ACTIONS.values()
        if chosen.name in names or not names
        for number in (range(chosen.numbers) if names else sorted({0, chosen.numbers - 1}))
    ]
    failed = False
    with ThreadPoolExecutor(jobs) as executor:
        for program, verdict in zip(programs, executor.map(judges.judge, programs), strict=True):
            failed |= verdict.kind == "FAILED"
            print(f"{verdict.kind}: {program}\n    {verdict.text}\n", flush=True)
    return failed


class Survey:
    """Many programs, several at a time."""

    def __init__(self, judges: Judges) -> None:
        self._judges = judges
        self._lock = threading.Lock()
        self._kinds: Counter[str] = Counter()
        self._known: dict[str, set[str]] = {}

    def run(self, seeds: range, jobs: int) -> bool:
        """Gives whether one has failed."""
        self._begun = time.monotonic()
        left = iter(seeds)
        with ThreadPoolExecutor(jobs) as executor:
            for done in [executor.submit(self._work, left) for _ in range(jobs)]:
                done.result()
        self._tell()
        return self._kinds["FAILED"] > 0

    def _work(self, left: Iterator[int]) -> None:
        while True:
            with self._lock:
                seed = next(left, None)
            if seed is None:
                return
            self._try(seed)

    def _try(self, seed: int) -> None:
        program = program_from(seed)
        verdict = self._judges.judge(program)
        words = unusual(program)
        with self._lock:
            self._kinds[verdict.kind] += 1
            if self._kinds.total() % 100 == 0:
                self._tell()
            if verdict.kind == "equal":
                return
            if verdict.kind == "FAILED":
                like = next((line for line, some in self._known.items() if some <= words), None)
                if like is not None:
                    print(f"{seed} FAILED, perhaps as [{like}]: {program}\n", flush=True)
                    return
                print(f"{seed} as drawn: {program}\n    {verdict.text[:300]}\n", flush=True)
        if verdict.kind == "FAILED":
            program, verdict = shortest(self._judges.judge, program, verdict)
        with self._lock:
            if verdict.kind == "FAILED":
                self._known[str(program)] = unusual(program)
            print(f"{seed} {verdict.kind}: {program}\n    {verdict.text[:6000]}\n", flush=True)

    def _tell(self) -> None:
        seconds = time.monotonic() - self._begun
        rate = self._kinds.total() / seconds
        print(f"{dict(self._kinds)}, {seconds:.0f} s, {rate:.2f} programs/s", flush=True)


def unusual(program: Program) -> set[str]:
    """The words of a program that not every program has."""
    calls = {call.name for step in (program.first, *program.steps) for call in step}
    setup = program.setup
    return (calls | {setup.model, setup.optimizer, *setup.options}) - {
        "zero", "backward", "step", "perceptron", "sgd",
    }  # fmt: skip


if __name__ == "__main__":
    main()
