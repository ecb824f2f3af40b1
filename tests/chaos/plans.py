"""What is drawn for one run, a job and its faults: all from the campaign's seed and a number."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from chaos.faults.every_fault import FAULTS, Fault
from chaos.faults.machine_faults import FullCommits
from chaos.faults.user_faults import OtherSetting
from chaos.jobs import JobPlan, draw_job
from chaos.moments import FIRST_STEP

__all__ = ["MOST", "Plan", "draw_plan"]

_KINDS = {"allreduce": 6, "servers": 6, "elastic": 5, "hosts": 3, "pair": 2, "tensorflow": 2}
_LIKELY = {"kill": 4, "kill launcher": 1, "interrupt": 1, "freeze": 1, "reset": 3, "cut": 3}
MOST = 5  # faults that a job survives, before one that it need not survive
_STEPS = 25  # for each fault


@dataclass(frozen=True)
class Plan:
    """One run."""

    seed: int
    number: int
    job: JobPlan
    faults: Sequence[Fault]

    def __str__(self) -> str:
        return f"{self.job}: " + "; ".join(str(fault) for fault in self.faults)


def draw_plan(
    seed: int, number: int, kind: str | None = None, fault: str | None = None, most: int = MOST
) -> Plan:
    """The run of this number in the campaign with this seed.

    Args:
        kind: of the job, in place of a drawn one.
        fault: the only one, in place of drawn ones.
        most: faults that the job survives.

    Raises:
        ValueError: this fault does not fit this kind of job.
    """
    numbers = random.Random(f"{seed}/{number}")
    drawn = numbers.choices(list(_KINDS), list(_KINDS.values()))[0]
    job = draw_job(numbers, kind or drawn)
    if fault is not None:
        return Plan(seed, number, *_with_one(numbers, job, kind, fault))
    mild = [each for each in FAULTS if not each.lethal and each.fits(job)]
    grave = [each for each in FAULTS if each.lethal and each.fits(job)]
    chosen = [numbers.choice(mild) for _ in range(numbers.randrange(most + 1))]
    if not chosen or numbers.random() < 0.7:
        chosen.append(numbers.choices(grave, [_LIKELY.get(each.name, 1) for each in grave])[0])
    if OtherSetting in chosen:
        chosen = [OtherSetting]  # the job does not begin, so nothing comes before or after
    job = replace(job, steps=FIRST_STEP + _STEPS * (len(chosen) + 1))
    return Plan(seed, number, job, _draw_faults(numbers, job, chosen))


def _with_one(
    numbers: random.Random, job: JobPlan, kind: str | None, name: str
) -> tuple[JobPlan, list[Fault]]:
    for _ in range(1000):
        fitting = [each for each in FAULTS if each.name == name and each.fits(job)]
        if fitting:
            return job, _draw_faults(numbers, job, [numbers.choice(fitting)])
        again = kind or numbers.choice(list(_KINDS))
        job = draw_job(numbers, again)
    raise ValueError(f"no job of the kind {kind or 'any'!r} can have the fault {name!r}")


def _draw_faults(
    numbers: random.Random, job: JobPlan, chosen: Sequence[type[Fault]]
) -> list[Fault]:
    faults: list[Fault] = []
    for place, each in enumerate(chosen):
        faults.append(each.draw(numbers, job, FIRST_STEP + _STEPS * place))
    for fault in faults:
        # With a folder of the user's, memory that is full concerns nobody.
        if isinstance(fault, FullCommits):
            return [each for each in faults if each.name != "full disk" or each is fault]
    return faults
