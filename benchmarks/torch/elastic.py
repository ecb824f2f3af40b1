"""A worker is killed: how long until training goes on, and is anything lost or done twice?

Each trial is a job of three workers, one of which is killed at a random moment. See README.md.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from helpers.launching import Job, launcher, launcher_environment
from helpers.training import elastic_training

from benchmarks.runner.records.environment import started
from benchmarks.runner.records.record import add_out_option, settings_of, write_record
from benchmarks.runner.records.report import table

BEGINS = r"rank (\d+) of (\d+) pid (\d+) begins at (\d+)$"
STEP = r"step (\d+) loss (\S+) at (\S+)$"


def main() -> None:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    found = started()
    losses, weights = elastic_training.reference(options.steps)
    trials = []
    for number in range(options.first, options.first + options.trials):
        victim = number % options.ranks
        moment = random.Random(number).randrange(options.steps // 4, options.steps // 2)
        trials.append(trial(options, victim, moment, losses, weights))
        print(f"trial {number}: {trials[-1]}", flush=True)
    rows = [
        [
            number, f"rank {one['victim']}", one["seen"], one["begin"], one["repeated"],
            f"{one['restart_s']:.1f}", f"{one['loss_error']:.0e}", f"{one['weight_error']:.0e}",
            "yes" if one["right"] else "NO",
        ]
        for number, one in enumerate(trials, options.first)
    ]  # fmt: skip
    header = ["trial", "killed", "last step", "goes on at", "steps repeated",
              "s to next step", "loss differs by", "weights differ by", "right"]  # fmt: skip
    print(f"\n{options.ranks} workers, a commit every {elastic_training.COMMIT_EVERY} steps\n")
    print(table(header, rows))
    median = statistics.median(one["restart_s"] for one in trials)
    print(f"\nmedian {median:.1f} s to the next step")
    write_record("elastic", found, settings_of(options), {"trials": trials},
                 {"restart_s": median, "right": all(one["right"] for one in trials)},
                 options.out)  # fmt: skip
    if not all(one["right"] for one in trials):
        raise SystemExit("FAIL: a trial ended with other weights, or other losses")


def trial(
    options: argparse.Namespace,
    victim: int,
    moment: int,
    losses: list[float],
    weights: list[float],
) -> dict[str, Any]:
    """Kills rank `victim` some time after step `moment`; compares with training in one process."""
    command = [sys.executable, elastic_training.__file__, str(options.steps), str(options.pace)]
    run = launcher("-np", str(options.ranks), "--min-np", str(options.ranks - 1))
    with Job([*run, *command], launcher_environment()) as job, _told(job):
        job.wait_for(STEP, lambda match: int(match[1]) >= moment)
        pids = {int(match[1]): int(match[3]) for match in job.matches(BEGINS)}
        killed_at = time.time()
        os.kill(pids[victim], signal.SIGKILL)
        job.wait_for("was ended by SIGKILL; starting all again")
        before = [int(match[1]) for match in job.matches(STEP)]
        begin = int(job.wait_for(BEGINS)[4])
        next_step = float(job.wait_for(STEP)[3])
        code = job.wait(300)
    ended = [ast.literal_eval(match[1]) for match in job.matches(r"weights (.*)$")]
    if code != 0 or len(ended) != 1:
        raise SystemExit(f"FAIL: the job ended with exit code {code}:\n{job.text()}")
    steps = [(int(match[1]), float(match[2])) for match in job.matches(STEP)]
    loss_error = max(abs(loss - losses[step]) / abs(losses[step]) for step, loss in steps)
    pairs = zip(ended[0], weights, strict=True)
    weight_error = max(abs(a - b) / max(abs(b), 1e-12) for a, b in pairs)
    whole = {step for step, _ in steps} == set(range(options.steps))
    return {
        "victim": victim,
        "seen": max(before),
        "begin": begin,
        "repeated": len(steps) - options.steps,
        "restart_s": next_step - killed_at,
        "loss_error": loss_error,
        "weight_error": weight_error,
        "right": whole and loss_error < 1e-9 and weight_error < 1e-9,
    }


@contextlib.contextmanager
def _told(job: Job) -> Iterator[None]:
    """Shows how far a job came that is given up, or ended from outside because it stands still."""
    try:
        yield
    except SystemExit:
        print(job.text(), file=sys.stderr)
        raise


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--first", type=int, default=1, help="number of the first one")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--pace", type=float, default=0.01, help="seconds of each step's work")
    add_out_option(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
