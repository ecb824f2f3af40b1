"""What a fault is: when it strikes, whom, and what must hold afterwards."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from chaos.jobs import Job, JobPlan
from chaos.moments import Moment
from chaos.pace import BUSY, TIMEOUT_S

__all__ = [
    "EITHER",
    "ENDS",
    "GOES_ON",
    "RUNNING",
    "Fault",
    "OnRole",
    "bound_s",
    "draw_role",
    "named",
    "send_signal",
]

GOES_ON, ENDS, EITHER = "goes on", "ends", "either"
RUNNING = ("first", "steady", "steady")
_MARGIN_S = 15.0  # for processes to notice and end, on a machine that is not busy
_GOING_ON_S = 30.0  # for the rest of a training that goes on, with new starts


def named(role: str) -> str:
    """A pattern that finds a rank, or a server, in a line for a user."""
    kind, _, number = role.partition(" ")
    if kind == "server":
        return r"\bserver \d"  # numbers are given as they arrive
    return rf"\branks? \[?(?:\d+, )*{number}\b"


class Fault:
    """One fault of one run.

    Attributes:
        name: of the kind.
        lethal: the job may end by it, so it comes last.
        moment: when.
        must: "goes on", "ends" or "either".
        culprits: patterns; one of them must be found in what the job says afterwards.
        needs_name: whether a culprit must be named although the job goes on.
        restarts: whether it makes an elastic job start again. Such a job ends if it has to three
            times without a commit in between, so each waits for a commit after the one before.
        victims: roles whose own end says nothing.
        frozen: roles that cannot end by themselves.
        struck_at: on the monotonic clock; None: it was too late, or nobody was there.
        sizes: of the job's output when it struck.
        notes: violations that it has seen itself.
        tail: what others than the job have said of them.
        slow_end: seconds that its end may take beside the usual.
    """

    name: ClassVar[str]
    lethal: ClassVar[bool] = True

    def __init__(self, moment: Moment) -> None:
        self.moment = moment
        self.must = EITHER
        self.culprits: list[str] = []
        self.needs_name = False
        self.restarts = False
        self.victims: set[str] = set()
        self.frozen: set[str] = set()
        self.struck_at: float | None = None
        self.sizes: dict[Path, int] = {}
        self.slow_end = 0.0
        self.notes: list[str] = []
        self.tail = ""

    @staticmethod
    def fits(plan: JobPlan) -> bool:
        """Whether such a job can have it."""
        return True

    @classmethod
    def draw(cls, numbers: random.Random, plan: JobPlan, earliest_step: int) -> Fault:
        raise NotImplementedError

    @staticmethod
    def missing() -> str | None:
        """What this machine lacks for it, with the cure."""
        return None

    def prepare(self, job: Job) -> None:
        """Before the job starts."""

    def strike(self, job: Job) -> bool:
        """Whether there was something to strike."""
        raise NotImplementedError

    def relieve(self, job: Job) -> None:
        """When all others have ended."""

    def __str__(self) -> str:
        return f"{self.name} at {self.moment}"


def send_signal(job: Job, role: str, number: signal.Signals) -> bool:
    pid = job.pid_of(role)
    if pid is None:
        return False
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


class OnRole(Fault):
    """A fault of one process."""

    def __init__(self, moment: Moment, role: str) -> None:
        super().__init__(moment)
        self.role = role

    def __str__(self) -> str:
        return f"{self.name} {self.role} at {self.moment}"


def draw_role(numbers: random.Random, plan: JobPlan) -> str:
    roles = [f"rank {rank}" for rank in range(plan.ranks)]
    return numbers.choice([*roles, *(f"server {number}" for number in range(plan.servers))])


def bound_s(faults: Sequence[Fault]) -> float:
    """Seconds from the last fault in which all must have ended, as busy as the machine is now."""
    work_s = _MARGIN_S + (_GOING_ON_S if any(f.must == GOES_ON for f in faults) else 0.0)
    return 2 * TIMEOUT_S + max((f.slow_end for f in faults), default=0.0) + work_s * BUSY
