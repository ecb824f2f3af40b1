"""Where the workers and servers of a job run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["JobPlacement", "MachinePart"]


class MachinePart(NamedTuple):
    """Workers and servers of a job on one machine, by the machine's number."""

    machine: int
    workers: int
    servers: int = 0


@dataclass(frozen=True)
class JobPlacement:
    """Workers and servers of a job, by machine.

    Attributes:
        parts: each machine once, by number; none is empty.
        batch: samples of a step of all workers; None: as the job says.
    """

    parts: tuple[MachinePart, ...]
    batch: int | None = None

    @classmethod
    def of(cls, parts: Iterable[tuple[int, int, int]], batch: int | None = None) -> JobPlacement:
        """Adds up (machine, workers, servers) by machine."""
        sums: dict[int, tuple[int, int]] = {}
        for machine, workers, servers in parts:
            w, s = sums.get(machine, (0, 0))
            sums[machine] = (w + workers, s + servers)
        return cls(tuple(MachinePart(m, *sums[m]) for m in sorted(sums) if any(sums[m])), batch)

    @property
    def workers(self) -> int:
        """Of all machines."""
        return sum(part.workers for part in self.parts)

    @property
    def servers(self) -> int:
        """Of all machines."""
        return sum(part.servers for part in self.parts)

    @property
    def machines(self) -> int:
        """How many machines it uses."""
        return len(self.parts)
