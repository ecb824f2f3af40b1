"""What must hold at the end of a run, whatever happened to it."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from chaos.faults.fault import Fault
from chaos.jobs import Job
from chaos.programs import problem

__all__ = ["Judgement", "judge", "left_in"]

# Against numpy, which adds in another order; in single precision with rounding at each step.
_TOLERANCE = {False: 1e-12, True: 1e-5}
_OF_OTHERS = ("__autograph_generated_file",)  # TensorFlow's own, when it is ended by a signal
_GLOO_THREW = re.compile(
    r"terminate called after throwing an instance of 'gloo::IoException'\n"
    r".*writev .*connection abort"
)
_CRASH = re.compile(r"SIGSEGV|SIGABRT|SIGBUS|Fatal Python error|terminate called")


class Judgement:
    """How a job has ended.

    Attributes:
        outcome: "went on" (all did what they should), "ended" or "hang".
        violations: what should not be.
        named: whether a culprit was named; None: there is none to name.
    """

    def __init__(self, outcome: str) -> None:
        self.outcome = outcome
        self.violations: list[str] = []
        self.named: bool | None = None


def judge(job: Job, faults: Sequence[Fault], hang: bool) -> Judgement:
    """Judges a job that is over, or has been ended since it was not."""
    struck = [fault for fault in faults if fault.struck_at is not None]
    victims = {role for fault in struck for role in fault.victims}
    codes = job.codes()
    ranks = range(job.plan.ranks)
    weights = {rank: _weights_of(job, rank) for rank in ranks}
    whole = [rank for rank in ranks if weights[rank] is not None]
    fine = all(code == 0 for role, code in codes.items() if role not in victims) and all(
        rank in whole or f"rank {rank}" in victims for rank in ranks
    )
    result = Judgement("hang" if hang else "went on" if fine else "ended")
    say = result.violations.append
    if hang:
        say(f"hang: exit codes {codes}")
        return result
    for problem_ in _wrong_weights(job, [w for w in weights.values() if w is not None]):
        say(f"silent wrong: {problem_}")
    for role, code in codes.items():
        mine = ranks if role == "launcher" else [r for r in ranks if role == f"rank {r}"]
        if code == 0 and any(rank not in whole for rank in mine):
            lacking = sorted(set(mine) - set(whole))
            say(f"silent wrong: {role} ended with 0, though ranks {lacking} did not finish")
        if (
            code is not None
            and code < 0
            and role not in victims
            and not _by_gloo(code, job, struck)
        ):
            say(f"crash: {role} was ended by signal {-code}")
    crash = _CRASH.search(job.output())
    if crash is not None and not _by_gloo(-signal.SIGABRT, job, struck):
        say(f"crash: the output says {crash[0]!r}")
    if result.outcome == "ended" and all(fault.must == "goes on" for fault in struck):
        say(f"did not go on: exit codes {codes}")
    if result.outcome == "went on" and any(fault.must == "ends" for fault in struck):
        say("nobody noticed")
    for fault in struck:
        blamed = result.outcome == "ended" and fault.must != "goes on"
        if fault.culprits and (blamed or fault.needs_name):
            said = job.output_since(fault.sizes)
            named = any(re.search(pattern, said) for pattern in fault.culprits)
            result.named = named if result.named is None else result.named and named
            if not named:
                say(f"culprit unnamed: nobody says {' or '.join(fault.culprits)}")
    return result


def _by_gloo(code: int, job: Job, struck: Sequence[Fault]) -> bool:
    """Whether Gloo has ended a process for a connection that the kernel destroyed (``ss -K``).

    Gloo takes ECONNABORTED of a write for a fault of its own and throws; on its own thread nothing
    catches that (docs/limits.md). A reset by a peer or a firewall is ECONNRESET, which it reports.
    """
    is_reset = any(fault.name == "reset" for fault in struck)
    return is_reset and code == -signal.SIGABRT and _GLOO_THREW.search(job.output()) is not None


def _weights_of(job: Job, rank: int) -> list[problem.Array] | None:
    path = job.folder / f"weights-{rank}.npz"
    if not path.exists():
        return None
    with np.load(path) as arrays:
        return [arrays[name] for name in arrays.files]


def _wrong_weights(job: Job, found: Sequence[list[problem.Array]]) -> Iterable[str]:
    """How weights differ: between ranks in any bit, from numpy's by more than rounding."""
    if not found:
        return
    for other in found[1:]:
        if any(a.tobytes() != b.tobytes() for a, b in zip(found[0], other, strict=True)):
            yield "ranks ended with different weights"
    wanted = problem.trained(job.plan.steps)
    for weights in found:
        apart = max(
            float(np.abs(a - b).max() / np.abs(b).max())
            for a, b in zip(weights, wanted, strict=True)
        )
        if not apart < _TOLERANCE[job.plan.float32]:
            yield f"weights differ from those of one process by {apart:.2g}"
            return


def left_in(folder: Path) -> list[str]:
    """Files and folders that are left in a folder that was empty."""
    return sorted(
        str((Path(where) / name).relative_to(folder))
        for where, folders, files in os.walk(folder)
        for name in [*folders, *files]
        if not name.startswith(_OF_OTHERS)
    )
