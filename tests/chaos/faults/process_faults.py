"""Faults of processes: killed, interrupted, frozen, paused."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time

from chaos.faults.fault import GOES_ON, RUNNING, Fault, OnRole, draw_role, named, send_signal
from chaos.jobs import Job, JobPlan
from chaos.moments import PHASES, Moment, draw_moment

__all__ = ["ElasticKill", "Freeze", "Interrupt", "Kill", "KillLauncher", "Pause"]


class _Loss(OnRole):
    """A process does nothing any more."""

    phases = PHASES  # of jobs that are not elastic

    def __init__(self, moment: Moment, role: str, plan: JobPlan) -> None:
        super().__init__(moment, role)
        self.culprits = [named(role)]
        self.victims = {role}
        if plan.kind == "elastic":
            self.must = GOES_ON
            self.restarts = True
            self.victims = set()
        # Before the third step servers hold nothing, and their lines are being made.
        if role.startswith("server") and plan.replicas and moment.phase == "steady":
            self.must = GOES_ON

    @classmethod
    def draw(cls, numbers: random.Random, plan: JobPlan, earliest_step: int) -> Fault:
        phases = RUNNING if plan.kind == "elastic" else cls.phases
        moment = draw_moment(numbers, plan.ranks, phases, earliest_step)
        return cls(moment, draw_role(numbers, plan), plan)


class Kill(_Loss):
    name = "kill"

    def __init__(self, moment: Moment, role: str, plan: JobPlan) -> None:
        super().__init__(moment, role, plan)
        self.needs_name = plan.kind == "elastic"

    def strike(self, job: Job) -> bool:
        return send_signal(job, self.role, signal.SIGKILL)


class ElasticKill(Kill):
    """A kill after which the job goes on, so that more can follow."""

    name = "kill"
    lethal = False

    @staticmethod
    def fits(plan: JobPlan) -> bool:
        return plan.kind == "elastic"


class KillLauncher(Fault):
    name = "kill launcher"

    def __init__(self, moment: Moment) -> None:
        super().__init__(moment)
        self.victims = {"launcher"}

    @staticmethod
    def fits(plan: JobPlan) -> bool:
        return plan.launcher

    @classmethod
    def draw(cls, numbers: random.Random, plan: JobPlan, earliest_step: int) -> Fault:
        return cls(draw_moment(numbers, plan.ranks, PHASES, earliest_step))

    def strike(self, job: Job) -> bool:
        return send_signal(job, "launcher", signal.SIGKILL)


class Interrupt(Fault):
    """Ctrl-C, SIGTERM or SIGHUP for the launcher."""

    name = "interrupt"

    def __init__(self, moment: Moment, number: signal.Signals) -> None:
        super().__init__(moment)
        self.number = number
        self.victims = {"launcher"}

    @staticmethod
    def fits(plan: JobPlan) -> bool:
        return plan.launcher

    @classmethod
    def draw(cls, numbers: random.Random, plan: JobPlan, earliest_step: int) -> Fault:
        moment = draw_moment(numbers, plan.ranks, PHASES, earliest_step)
        return cls(moment, numbers.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP]))

    def strike(self, job: Job) -> bool:
        return send_signal(job, "launcher", self.number)

    def __str__(self) -> str:
        return f"{self.name} by {self.number.name} at {self.moment}"


class Freeze(_Loss):
    """SIGSTOP, for ever."""

    name = "freeze"
    phases = PHASES[1:4]

    def __init__(self, moment: Moment, role: str, plan: JobPlan) -> None:
        super().__init__(moment, role, plan)
        self.frozen = {role}
        if plan.launcher:
            self.slow_end = 30.0  # that torch's agent gives between SIGTERM and SIGKILL

    def strike(self, job: Job) -> bool:
        return send_signal(job, self.role, signal.SIGSTOP)

    def relieve(self, job: Job) -> None:
        if self.role in job.starts:  # nobody but the user of bare ranks could end it
            send_signal(job, self.role, signal.SIGKILL)
            job.starts[self.role].wait(10)


class Pause(OnRole):
    """SIGSTOP, and SIGCONT within the timeout."""

    name = "pause"
    lethal = False

    def __init__(self, moment: Moment, role: str, length_s: float) -> None:
        super().__init__(moment, role)
        self.length_s = length_s
        self.must = GOES_ON

    @classmethod
    def draw(cls, numbers: random.Random, plan: JobPlan, earliest_step: int) -> Fault:
        moment = draw_moment(numbers, plan.ranks, ("import", "init", *RUNNING), earliest_step)
        length_s = round(numbers.choice([0.05, 0.3, 1.0, 3.0]) * numbers.random(), 3)
        role = "launcher" if plan.launcher and numbers.random() < 0.15 else None
        return cls(moment, role or draw_role(numbers, plan), length_s)

    def strike(self, job: Job) -> bool:
        pid = job.pid_of(self.role)
        if pid is None or not send_signal(job, self.role, signal.SIGSTOP):
            return False
        time.sleep(self.length_s)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        return True

    def __str__(self) -> str:
        return f"{self.name} {self.role} for {self.length_s:g} s at {self.moment}"
