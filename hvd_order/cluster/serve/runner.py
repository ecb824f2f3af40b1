"""What starts, changes and stops the processes of jobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hvd_order.cluster.serve.jobs_file import ServedJob

__all__ = ["JobStatus", "Runner", "Slots", "counts"]

Slots = Mapping[str, tuple[int, ...]]
"""Slots of machines by the machines' names; slot k of a machine stands for its device k."""


def counts(slots: Slots) -> dict[str, int]:
    """Workers by machine."""
    return {name: len(numbers) for name, numbers in slots.items() if numbers}


@dataclass(frozen=True)
class JobStatus:
    """How a job is.

    Attributes:
        running: whether any of its processes may run.
        code: exit code of an ended one; None: there is none, since it was killed or lost.
        within_slots: whether it uses no slot beside those that it was given last.
    """

    running: bool
    code: int | None = None
    within_slots: bool = True


class Runner(Protocol):
    """Runs jobs. No method waits for one."""

    @property
    def resizes(self) -> bool:
        """Whether `give` works; else a change is a stop and a start."""
        ...

    def start(self, served: ServedJob, slots: Slots) -> None:
        """Starts a job that does not run; it goes on from its last commit, if it has one.

        Raises:
            OSError, InvalidUsage: it cannot be started.
        """
        ...

    def give(self, name: str, slots: Slots) -> None:
        """Changes what a running job has, at its next commit."""
        ...

    def stop(self, name: str) -> None:
        """Asks a running job to end at its next commit."""
        ...

    def kill(self, name: str) -> None:
        """Ends a job at once."""
        ...

    def look(self, name: str) -> JobStatus:
        """How a job that was started is."""
        ...

    def find(self, name: str) -> Slots | None:
        """The slots of a job that an earlier scheduler started; None: it started none."""
        ...

    def log(self, name: str) -> Path:
        """File with the job's output."""
        ...
