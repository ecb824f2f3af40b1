"""Faults of those who start jobs: settings that differ between ranks, a port that is taken."""

from __future__ import annotations

import random
import re
import time
from typing import ClassVar

from chaos.faults.fault import ENDS, GOES_ON, RUNNING, Fault, bound_s, named
from chaos.jobs import Job, JobPlan
from chaos.moments import Moment, draw_moment
from chaos.pace import TIMEOUT_S

__all__ = ["OtherSetting", "SamePort"]


class OtherSetting(Fault):
    """One rank has another value of a variable that all must have the same of."""

    name = "wrong settings"

    CHOICES: ClassVar = {
        "HVD_ORDER_SLICE_BYTES": ["128", "1KiB", "64KiB"],
        "HVD_ORDER_CREDIT_BYTES": ["8KiB", "1MiB"],
        "HVD_ORDER_AGREEMENT": ["negotiated"],
        "HVD_ORDER_POLICY": ["arrival"],
        "HVD_ORDER_TUNE": ["0"],
        "HVD_ORDER_CROSS_ITERATION": ["0"],
        "HVD_ORDER_COMM": ["ps"],
        "HVD_ORDER_CHECK_RANKS": ["0"],
        "WORLD_SIZE": ["4"],
    }

    def __init__(self, moment: Moment, rank: int, variable: str, value: str, plan: JobPlan) -> None:
        super().__init__(moment)
        self.rank, self.variable, self.value = rank, variable, value
        self.must = ENDS
        self.slow_end = 10.0  # from the start
        if plan.kind == "elastic":
            self.slow_end = 4.0 * TIMEOUT_S  # it is tried three times
        # All of it in one place, on as many lines as it takes.
        who = named(f"rank {rank}")
        self.culprits = [rf"(?s){variable}.{{0,300}}{who}", rf"(?s){who}.{{0,300}}{variable}"]

    @staticmethod
    def fits(plan: JobPlan) -> bool:
        return plan.kind in ("allreduce", "servers", "elastic", "hosts", "tensorflow")

    @classmethod
    def draw(cls, numbers: random.Random, plan: JobPlan, earliest_step: int) -> Fault:
        given = {**plan.variables, "HVD_ORDER_COMM": "ps" if plan.servers else "allreduce"}
        fitting = [
            (variable, value)
            for variable, values in cls.CHOICES.items()
            for value in values
            if given.get(variable) != value and not (variable == "WORLD_SIZE" and plan.launcher)
        ]
        variable, value = numbers.choice(fitting)
        moment = Moment("import", 0, 0, 0.0)
        return cls(moment, numbers.randrange(plan.ranks), variable, value, plan)

    def prepare(self, job: Job) -> None:
        job.extra["CHAOS_SETTING"] = f"{self.rank}:{self.variable}={self.value}"

    def strike(self, job: Job) -> bool:
        return True

    def __str__(self) -> str:
        return f"{self.name}: {self.variable}={self.value} on rank {self.rank}"


class SamePort(Fault):
    """Somebody starts another job with the same MASTER_PORT."""

    name = "same port"
    lethal = False

    def __init__(self, moment: Moment, plan: JobPlan) -> None:
        super().__init__(moment)
        self.must = GOES_ON
        self._second: Job | None = None
        self._plan = plan

    @staticmethod
    def fits(plan: JobPlan) -> bool:
        return plan.kind in ("pair", "allreduce") and not plan.launcher

    @classmethod
    def draw(cls, numbers: random.Random, plan: JobPlan, earliest_step: int) -> Fault:
        return cls(draw_moment(numbers, plan.ranks, ("init", *RUNNING), earliest_step), plan)

    def strike(self, job: Job) -> bool:
        place = len(list(job.folder.parent.glob("second*")))
        self._second = Job(self._plan, job.folder.with_name(f"second{place}"), job.port)
        self._second.start()
        return True

    def relieve(self, job: Job) -> None:
        second = self._second
        if second is None or self.struck_at is None:
            return
        deadline = self.struck_at + bound_s([])
        while not second.is_over() and time.monotonic() < deadline:
            time.sleep(0.05)
        codes = second.codes()
        if not second.is_over():
            second.end()
            self.notes.append(f"hang: the second job on the port runs on: {codes}")
        elif 0 in codes.values():
            if any((second.folder / f"weights-{r}.npz").exists() for r in range(9)):
                return  # the first had ended before it began
            self.notes.append(f"the second job on the port ended with {codes}")
        elif not re.search(rf"\bport\b|:{second.port}\b", second.output()):
            self.notes.append("culprit unnamed: the second job on the port does not name it")
        if self.notes:
            self.tail = second.output()[-3000:]
