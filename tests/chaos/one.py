"""One run, in namespaces of its own; run.py starts it. Prints what came of it, as a line of JSON.

Network, processes, /dev/shm and temporary files are the run's own, so whatever is there at the end
was left by the job, and runs beside each other do not meet.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chaos.faults.fault import Fault, bound_s
from chaos.faults.strangers import listening
from chaos.invariants import Judgement, judge, left_in
from chaos.jobs import OTHER_PORT, HostsJob, Job
from chaos.moments import PATIENCE_S
from chaos.pace import TIMEOUT_S
from chaos.plans import MOST, Plan, draw_plan
from helpers.flags import comes_true
from helpers.processes import arguments_of, environment_of, processes

__all__ = ["run_plan"]

_QUICK_S = 5.0  # for processes to be gone after those that the campaign has started
_LOOK_S = 0.02
_TAIL = 6000  # characters of output, where something was violated
_SHARED_MEMORY = Path("/dev/shm")


def make_room(folder: Path) -> None:
    """The loopback interface, and small file systems that can be full."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    temporary = folder / "tmp"
    temporary.mkdir()
    for where, size in ((temporary, "16m"), (_SHARED_MEMORY, "16m")):
        tmpfs = ["-t", "tmpfs", "-o", f"size={size},mode=1777", "tmpfs", str(where)]
        subprocess.run(["mount", *tmpfs], check=True)


def run_plan(plan: Plan, folder: Path) -> dict[str, Any]:
    """Carries it out; returns what is to be kept of it."""
    begin = time.monotonic()
    make_room(folder)
    make = HostsJob if plan.job.kind == "hosts" else Job
    job = make(plan.job, folder / "job")
    jobs = [job]
    if plan.job.kind == "pair":
        jobs.append(Job(plan.job, folder / "other", OTHER_PORT))
    for fault in plan.faults:
        fault.prepare(job)
    there = set(processes()) | {os.getpid()}
    for each in jobs:
        each.start()
    restarts = 0
    for fault in plan.faults:
        if fault.moment.wait(job) and (not fault.restarts or _wait_for_commit(job, restarts)):
            fault.sizes = job.output_sizes()
            at = time.monotonic()
            if fault.strike(job):
                fault.struck_at = at
                restarts += fault.restarts
    last = max((f.struck_at for f in plan.faults if f.struck_at), default=time.monotonic())
    bound = bound_s(plan.faults)
    hang, orphans = _wait(jobs, plan.faults, there, last + bound)
    ended = time.monotonic()
    if hang:
        for each in jobs:
            each.end()
    for fault in plan.faults:
        fault.relieve(job)
    result = judge(job, plan.faults, hang)
    for other in jobs[1:]:
        beside = judge(other, [], False) if not hang else Judgement("hang")
        result.violations += [f"the other job: {text}" for text in beside.violations]
        if beside.outcome != "went on":
            result.violations.append(f"the other job {beside.outcome}: {other.codes()}")
    for fault in plan.faults:
        result.violations += fault.notes
    result.violations += orphans
    if not hang:
        result.violations += _left(job)
    if isinstance(job, HostsJob):
        job.hosts.close()
    record: dict[str, Any] = {
        "seed": plan.seed,
        "number": plan.number,
        "job": plan.job.kind,
        "how": str(plan.job),
        "faults": [
            {
                "fault": fault.name,
                "how": str(fault),
                "struck_after_s": _rounded(fault.struck_at, begin),
            }
            for fault in plan.faults
        ],
        "outcome": result.outcome,
        "end_after_s": round(ended - last, 2),
        "bound_s": round(bound, 1),
        "timeout_s": TIMEOUT_S,
        "culprit_named": result.named,
        "violations": result.violations,
    }
    if result.violations:
        tails = [each.output()[-_TAIL:] for each in jobs]
        record["tail"] = "\n".join([*tails, *(fault.tail for fault in plan.faults)])
    return record


def _wait_for_commit(job: Job, restarts: int) -> bool:
    comes_true(lambda: job.is_over() or job.has_new_commit(restarts), PATIENCE_S)
    return job.has_new_commit(restarts)


def _wait(
    jobs: list[Job], faults: Sequence[Fault], there: set[int], deadline: float
) -> tuple[bool, list[str]]:
    """Waits until nothing of the jobs runs. Returns whether that was in vain, and what was left."""
    frozen = {role for fault in faults if fault.struck_at for role in fault.frozen}
    frozen &= jobs[0].starts.keys()  # a launcher has to deal with its own
    still = {jobs[0].starts[role].pid for role in frozen}
    over_at = None
    launcher_killed = any(fault.name == "kill launcher" and fault.struck_at for fault in faults)
    while time.monotonic() < deadline:
        codes = [code for job in jobs for role, code in job.codes().items() if role not in frozen]
        if None not in codes:
            over_at = over_at or time.monotonic()
            left = _left_running(jobs, there | still)
            if not left:
                return False, []
            if not launcher_killed and time.monotonic() > over_at + _QUICK_S:
                break
        time.sleep(_LOOK_S)
    if over_at is None:
        return True, []
    said = [f"{pid} {' '.join(arguments_of(pid))}" for pid in _left_running(jobs, there | still)]
    return False, [f"orphans: {said}"] if said else []


def _left_running(jobs: list[Job], others: set[int]) -> list[int]:
    if isinstance(jobs[0], HostsJob):
        return [pid for pid in jobs[0].living() if pid not in others]
    # A second job that a fault has started, and its own helpers, are no part of this one.
    mine = {pid for job in jobs for pid in job.living()}
    alien = {pid for pid in processes() if pid not in others and _folder_of(pid) is not None}
    return [pid for pid in processes() if pid not in others and (pid in mine or pid not in alien)]


def _folder_of(pid: int) -> str | None:
    return environment_of(pid).get("CHAOS_FOLDER")


def _left(job: Job) -> list[str]:
    """Files and ports that the job has left."""
    left = []
    for folder in (job.temporary, _SHARED_MEMORY):
        files = left_in(folder)
        if files:
            left.append(f"left in {folder.name}: {files}")
    ports = sorted(port for _, port, _ in listening())
    if ports and not isinstance(job, HostsJob):
        left.append(f"ports left: {ports}")
    return left


def _rounded(at: float | None, begin: float) -> float | None:
    return None if at is None else round(at - begin, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("number", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--job")
    parser.add_argument("--fault")
    parser.add_argument("--most", type=int, default=MOST)
    options = parser.parse_args()
    plan = draw_plan(options.seed, options.number, options.job, options.fault, options.most)
    record = run_plan(plan, options.folder)
    print(json.dumps(record))


if __name__ == "__main__":
    main()
