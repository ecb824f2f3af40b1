"""When a fault strikes: a phase in the life of a rank, a step, and a delay."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from chaos.jobs import Job
from helpers.flags import comes_true

__all__ = ["FIRST_STEP", "PATIENCE_S", "PHASES", "Moment", "draw_moment"]

PHASES = ("import", "init", "first", "steady", "shutdown")
FIRST_STEP = 5  # the training is in its steady state
PATIENCE_S = 90.0  # for a moment to come, on a machine that is busy


@dataclass(frozen=True)
class Moment:
    """`delay_s` after rank `rank` has begun a phase, or has taken `step` steps."""

    phase: str
    rank: int
    step: int
    delay_s: float

    def __str__(self) -> str:
        where = f"step {self.step}" if self.phase in ("first", "steady") else self.phase
        return f"{where} of rank {self.rank} + {self.delay_s * 1e3:.0f} ms"

    def wait(self, job: Job) -> bool:
        """Waits for it. False: the job has ended before; or nothing moves for very long."""
        comes_true(lambda: job.is_over() or self._is_there(job), PATIENCE_S)
        if not self._is_there(job):
            return False
        time.sleep(self.delay_s)
        return not job.is_over()

    def _is_there(self, job: Job) -> bool:
        diary = job.diary(self.rank)
        if self.phase in ("first", "steady"):
            return job.step(self.rank) >= self.step or "trained" in diary
        return {"import": "import", "init": "init", "shutdown": "trained"}[self.phase] in diary


def draw_moment(
    numbers: random.Random, ranks: int, phases: tuple[str, ...], earliest_step: int
) -> Moment:
    """One in one of these phases; a steady one comes at most 25 steps after the earliest step.

    A fault that follows others strikes in the steady phase.
    """
    phase = numbers.choice(phases if earliest_step <= FIRST_STEP else ("steady",))
    step = {"first": numbers.randrange(1, 4), "steady": earliest_step + numbers.randrange(25)}
    longest_s = {"import": 2.0, "init": 0.4, "first": 0.03, "steady": 0.03, "shutdown": 0.02}
    return Moment(
        phase,
        numbers.randrange(ranks),
        step.get(phase, 0),
        round(numbers.uniform(0, longest_s[phase]), 4),
    )
