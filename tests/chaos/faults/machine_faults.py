"""Faults of the machine: a disk that is full, a clock that jumps."""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
import sys
from pathlib import Path

from chaos.faults.fault import EITHER, GOES_ON, RUNNING, Fault
from chaos.jobs import Job, JobPlan
from chaos.moments import Moment, draw_moment

__all__ = ["ClockJump", "FullCommits", "FullDisk"]


_MEMORY = Path("/dev/shm")


class FullDisk(Fault):
    """A folder has no room any more: the memory's, that for temporary files, or that of commits."""

    name = "full disk"
    lethal = False

    def __init__(self, moment: Moment, which: str) -> None:
        super().__init__(moment)
        self.which = which
        self.must = GOES_ON
        if which == "commits":
            self.must = EITHER
            self.culprits = [r"does not fit into"]
        self._folder = _MEMORY

    @staticmethod
    def fits(plan: JobPlan) -> bool:
        return plan.kind in ("elastic", "servers", "allreduce")

    @classmethod
    def draw(cls, numbers: random.Random, plan: JobPlan, earliest_step: int) -> Fault:
        which = numbers.choice(["memory", "temporary"])
        return cls(draw_moment(numbers, plan.ranks, RUNNING, earliest_step), which)

    def prepare(self, job: Job) -> None:
        if self.which == "temporary":
            self._folder = job.temporary

    def strike(self, job: Job) -> bool:
        try:
            with (self._folder / "filler").open("wb", buffering=0) as filler:
                while True:
                    filler.write(b"x" * 4096)
        except OSError:
            pass
        if job.plan.kind == "elastic" and all(
            (folder / "filler").exists() for folder in (_MEMORY, job.temporary)
        ):
            self.must = EITHER  # no room for commits anywhere
            self.culprits = [r"does not fit into"]
        return True

    def relieve(self, job: Job) -> None:
        (self._folder / "filler").unlink(missing_ok=True)

    def __str__(self) -> str:
        return f"{self.name} ({self.which}) at {self.moment}"


class FullCommits(FullDisk):
    """The folder that the user has named for commits is full."""

    lethal = True

    @staticmethod
    def fits(plan: JobPlan) -> bool:
        return plan.kind == "elastic"

    @classmethod
    def draw(cls, numbers: random.Random, plan: JobPlan, earliest_step: int) -> Fault:
        return cls(draw_moment(numbers, plan.ranks, RUNNING, earliest_step), "commits")

    def prepare(self, job: Job) -> None:
        self._folder = job.folder.with_name("commits")
        self._folder.mkdir()
        size = ["-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs"]
        subprocess.run(["mount", *size, str(self._folder)], check=True)
        job.extra["HVD_ORDER_ELASTIC_DIR"] = str(self._folder)


def _compiler() -> str:
    return os.environ.get("CXX", "c++")


class ClockJump(Fault):
    """The wall clock of one rank jumps; nobody else's does."""

    name = "clock jump"
    lethal = False

    def __init__(self, moment: Moment, rank: int, by_s: int) -> None:
        super().__init__(moment)
        self.rank, self.by_s = rank, by_s
        self.must = GOES_ON

    @staticmethod
    def missing() -> str | None:
        if sys.platform != "linux" or shutil.which(_compiler()) is None:
            return f"it needs a C++ compiler, and there is no {_compiler()}"
        return None

    @classmethod
    def draw(cls, numbers: random.Random, plan: JobPlan, earliest_step: int) -> Fault:
        moment = draw_moment(numbers, plan.ranks, ("init", *RUNNING), earliest_step)
        by_s = numbers.choice([-1, 1]) * numbers.choice([5, 3600, 10**6])
        return cls(moment, numbers.randrange(plan.ranks), by_s)

    def prepare(self, job: Job) -> None:
        clocks = job.folder.with_name("clocks")
        library = clocks / "moved_clock.so"
        if not library.exists():  # another jump of this run may have made them
            clocks.mkdir()
            source = Path(__file__).with_name("moved_clock.c")
            build = [_compiler(), "-x", "c", "-shared", "-fPIC", "-O1", str(source), "-ldl"]
            subprocess.run([*build, "-o", str(library)], check=True)
            for rank in range(job.plan.ranks):
                (clocks / str(rank)).write_bytes(struct.pack("=q", 0))
        self._file = clocks / str(self.rank)
        job.extra["CHAOS_CLOCKS"] = str(clocks)

    def strike(self, job: Job) -> bool:
        with self._file.open("r+b") as file:  # in place: the rank has mapped it
            file.write(struct.pack("=q", self.by_s))
        return True

    def __str__(self) -> str:
        return f"{self.name} of rank {self.rank} by {self.by_s} s at {self.moment}"
