"""How far are simulated completion times off those of real jobs? See README.md.

Six elastic jobs on two emulated machines of three slots, all on this host. Speeds and the cost of
a start and a resize are measured with one job first; the simulation knows nothing else.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import re
import shlex
import signal
import statistics
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.runner.question import Answer, ask, option
from benchmarks.runner.records.environment import ROOT
from hvd_order.cluster.model.job import ClusterJob
from hvd_order.cluster.model.machines import Machine, Machines
from hvd_order.cluster.model.placement import JobPlacement
from hvd_order.cluster.policies.interface import ClusterPolicy, PolicyDecision, View
from hvd_order.cluster.policies.registry import PolicyInputs, policy
from hvd_order.cluster.serve.jobs_file import SLOT, read_jobs
from hvd_order.cluster.serve.local import LocalRunner
from hvd_order.cluster.serve.scheduler import JobScheduler, ServeRules
from hvd_order.cluster.simulate.outcome import JobOutcome
from hvd_order.cluster.simulate.simulator import Rules, simulate

_HOSTS = ("localhost", "127.0.0.1")  # both are this host, without ssh
_SLOTS = 3
_BATCH = 12
_SAMPLE_S = 0.05
_PHASES = (1, 2, 3, 0, 1)  # workers of the job that is measured
_STEPS_OF_CHANGE = 8  # room for steps between a decision and the change
_STEP = re.compile(r"step (\d+) of (\d+) (\S+)$", re.MULTILINE)
# Arrival in seconds, workers asked for, and steps of one worker, each 0.6 s of waiting.
_JOBS = ((0, 2, 170), (6, 1, 100), (12, 2, 130), (18, 1, 70), (24, 2, 90), (30, 2, 70))
_STOPS = ("fifo", "srtf")  # policies that stop jobs, and do not change how many workers they have


def compare_all(options: argparse.Namespace) -> Answer:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        costs = measure(folder / "alone", options)
        print(f"\n{costs}\n", flush=True)
        runs = [compare(each, folder / each, costs, options) for each in options.policies]
    for run in runs:
        print(f"{run['policy']}: mean completion {run['real_s']:.1f} s, simulated "
              f"{run['simulated_s']:.1f} s, {run['error']:+.1%}")  # fmt: skip
    raw = {
        "runs": runs,
        "rates": {str(workers): rate for workers, rate in costs.rates.items()},
        "start_s": costs.starts_s,
        "end_s": costs.ends_s,
        "resize_s": costs.resizes_s,
        "resume_s": costs.resumes_s,
    }
    summary = {
        "worst_error": max(abs(run["error"]) for run in runs),
        "errors": {run["policy"]: run["error"] for run in runs},
        "start_s": costs.start_s,
        "resize_s": costs.change_s("optimus"),
        "resume_s": costs.change_s("srtf"),
    }
    return Answer(raw, summary, name="cluster-fidelity")


# ---- measurement ----


@dataclass(frozen=True)
class Costs:
    """What the simulation is told.

    Attributes:
        rates: samples a second by workers.
        starts_s: from the decision to where training would have begun at that rate.
        ends_s: from the last step to when the scheduler knows it.
        resizes_s: what a job loses by each change: see `_lost_s`.
        resumes_s: the same of a job that was stopped.
    """

    rates: Mapping[int, float]
    starts_s: Sequence[float]
    ends_s: Sequence[float]
    resizes_s: Sequence[float]
    resumes_s: Sequence[float]

    @property
    def start_s(self) -> float:
        """Of a job: its start, and its end, which the simulator does not know."""
        return statistics.mean(self.starts_s) + statistics.mean(self.ends_s)

    def change_s(self, policy_name: str) -> float:
        """Of a change, of the kind that a policy makes."""
        return statistics.mean(self.resumes_s if policy_name in _STOPS else self.resizes_s)

    def __str__(self) -> str:
        rates = ", ".join(f"{rate:.2f} with {n}" for n, rate in self.rates.items())
        return (
            f"samples/s: {rates}; a start and an end cost {self.start_s:.2f} s, a resize "
            f"{self.change_s('optimus'):.2f} s, a resume {self.change_s('srtf'):.2f} s"
        )


class _Phases:
    """Gives the only job the next number of workers after so many steps with the last one."""

    def __init__(self, log: Path, steps: int) -> None:
        self.log = log
        self.steps = steps
        self.phase = -1
        self.asked_s: list[float] = []  # when each phase was decided

    def decide(self, view: View) -> PolicyDecision:
        decision = PolicyDecision(wake_s=view.now_s + 0.05)
        for name in (*view.waiting, *view.running):
            if self.phase + 1 == len(_PHASES) or not self._over():
                continue
            self.phase += 1
            count = _PHASES[self.phase]
            parts = [(machine, 1, 0) for machine in (0, 1, 0)[:count]]
            decision.place[name] = JobPlacement.of(parts) if parts else None
            self.asked_s.append(view.now_s)
        return decision

    def _over(self) -> bool:
        if self.phase < 0:
            return True
        if _PHASES[self.phase] == 0:
            return (self.log.parent / "code").exists()
        steps = _steps(self.log)
        same = 0
        while same < len(steps) and steps[-1 - same][1] == _PHASES[self.phase]:
            same += 1
        return same >= self.steps


def _steps(log: Path) -> list[tuple[int, int, float]]:
    """Number, workers and end of each step; seconds since the epoch."""
    text = log.read_text() if log.exists() else ""
    return [(int(m[1]), int(m[2]), float(m[3])) for m in _STEP.finditer(text)]


def measure(folder: Path, options: argparse.Namespace) -> Costs:
    """Runs one job with 1, 2 and 3 workers, stops it, and goes on with 1."""
    count = (options.phase_steps + _STEPS_OF_CHANGE) * (len(_PHASES) - 1)
    jobs = [(0.0, 1, count)]
    policy_object = _Phases(folder / "jobs" / "job0" / "log", options.phase_steps)
    ended = serve(folder, jobs, policy_object, {1: 20.0}, 10.0, options.limit)
    steps = _steps(folder / "jobs" / "job0" / "log")
    origin = json.loads((folder / "journal").read_text().splitlines()[0])["origin"]
    intervals: dict[int, list[float]] = {}
    for (_, before, begin), (_, after, end) in itertools.pairwise(steps):
        if before == after:  # else a resize lies between them
            intervals.setdefault(after, []).append(end - begin)
    rates = {n: _BATCH / statistics.median(values) for n, values in sorted(intervals.items())}
    asked = [origin + at_s for at_s in policy_object.asked_s]
    if len(asked) < len(_PHASES) or steps[-1][1] != _PHASES[-1]:
        raise SystemExit("FAIL: the measured job ended before its last change; is other work "
                         "running?")  # fmt: skip
    first = steps[0]
    start_s = first[2] - asked[0] - _BATCH / rates[1]
    resizes, resumes = [], []
    for phase, (before, after) in enumerate(itertools.pairwise(_PHASES), 1):
        if after:
            lost_s = _lost_s(steps, asked[phase], before, after, rates)
            (resizes if before else resumes).append(lost_s)
    end_s = origin + float(ended["job0"]["ended_s"]) - steps[-1][2]
    return Costs(rates, [start_s], [end_s], resizes, resumes)


def _lost_s(
    steps: Sequence[tuple[int, int, float]],
    asked: float,
    before: int,
    after: int,
    rates: Mapping[int, float],
) -> float:
    """Time that a job stood still, as the simulator counts: until the change it does nothing, and
    from then on it is as fast as after it. What it really did until then counts for it.
    """
    done = max(step for step, _, end in steps if end <= asked)
    at_s = max(end for step, _, end in steps if step == done)
    begun = done + (asked - at_s) * rates.get(before, 0.0) / _BATCH
    number, end = next((s, e) for s, workers, e in steps if e > asked and workers == after)
    return (end - asked) - (number - begun) * _BATCH / rates[after]


# ---- real and simulated ----


def serve(
    folder: Path,
    jobs: Sequence[tuple[float, int, int]],
    chosen: ClusterPolicy,
    rates: Mapping[int, float],
    resize_s: float,
    limit_s: float,
) -> dict[str, dict[str, str]]:
    """Runs jobs for real; returns the outcomes by job."""
    folder.mkdir()
    path = folder / "jobs.csv"
    script = str(Path(__file__).with_name("timed_job.py"))
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("name", "command", "workers", "arrival_s", "samples", "speed", "most"))
        for number, (arrival_s, workers, steps) in enumerate(jobs):
            command = [sys.executable, script, str(steps), "--batch", str(_BATCH),
                       "--sample-s", str(_SAMPLE_S)]  # fmt: skip
            speed = " ".join(f"{count}:{rate!r}" for count, rate in rates.items())
            rows.writerow((f"job{number}", shlex.join(command), workers, arrival_s,
                           steps * _BATCH, speed, _SLOTS))  # fmt: skip
    rules = ServeRules(resize_s=resize_s, restarts=0, once=True)
    runner = LocalRunner(folder / "jobs", 60.0)
    stop, at_once = threading.Event(), threading.Event()
    timer = threading.Timer(limit_s, stop.set)
    timer.start()
    try:
        code = JobScheduler(folder, path, _machines(), chosen, runner, rules).run(stop, at_once)
    finally:
        timer.cancel()
    if code != 0 or stop.is_set():
        raise SystemExit(f"FAIL: not all jobs completed within {limit_s:g} s")
    with (folder / "outcomes.csv").open(newline="") as file:
        return {row["job"]: row for row in csv.DictReader(file)}


def _machines() -> Machines:
    return Machines([Machine(host, {SLOT: float(_SLOTS)}) for host in _HOSTS])


def compare(name: str, folder: Path, costs: Costs, options: argparse.Namespace) -> dict[str, Any]:
    """Runs the jobs under a policy, for real and simulated."""
    jobs = [(arrival * options.scale, workers, round(steps * options.scale))
            for arrival, workers, steps in _JOBS]  # fmt: skip
    print(f"{name}:", flush=True)
    machines = _machines()
    known = PolicyInputs(machines, None, float("inf"), [])
    change_s = costs.change_s(name)
    ended = serve(folder, jobs, policy(name, known), costs.rates, change_s, options.limit)
    same: list[ClusterJob] = [served.job for _, served in read_jobs(folder / "jobs.csv")]
    outcomes: dict[str, JobOutcome] = {}
    simulate(
        same, machines, policy(name, known),
        Rules(start_s=costs.start_s, resize_s=change_s),
        ended=lambda outcome: outcomes.update({outcome.name: outcome}),
    )  # fmt: skip
    real = {each: float(row["completion_s"]) for each, row in ended.items()}
    simulated = {each: outcomes[each].completion_s or 0.0 for each in real}
    means = statistics.mean(real.values()), statistics.mean(simulated.values())
    changes = {each: (int(row["changes"]), outcomes[each].changes) for each, row in ended.items()}
    for each in sorted(real):
        print(f"  {each}: {real[each]:.1f} s, simulated {simulated[each]:.1f} s; changes "
              f"{changes[each][0]}, simulated {changes[each][1]}", flush=True)  # fmt: skip
    return {
        "policy": name,
        "real": real,
        "simulated": simulated,
        "changes": {each: list(pair) for each, pair in changes.items()},
        "real_s": means[0],
        "simulated_s": means[1],
        "error": means[1] / means[0] - 1,
    }


if __name__ == "__main__":
    sys.exit(ask(
        "cluster", __doc__, compare_all,
        option("--policies", ["fifo", "srtf", "optimus"]),
        option("--scale", 1.0, "longer or shorter jobs"),
        option("--phase-steps", 8, "steps that are measured with each number of workers"),
        option("--limit", 400.0, "seconds a run at most"),
        quick={"policies": ["fifo"], "scale": 0.2, "phase_steps": 2},
    ))  # fmt: skip
