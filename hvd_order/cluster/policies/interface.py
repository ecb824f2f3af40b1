"""What a policy sees and what it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from hvd_order.cluster.model.job import ClusterJob
from hvd_order.cluster.model.machines import Amounts, Machines
from hvd_order.cluster.model.placement import JobPlacement

__all__ = ["ClusterPolicy", "JobState", "PolicyDecision", "View"]


@dataclass(eq=False)
class JobState:
    """A job that has arrived and has neither ended nor been rejected.

    Attributes:
        number: of its arrival, from 0.
        worker, server: its demands as rows.
        placement: where it runs; None: it waits.
        started_s: when it first ran; None: never so far.
        placed_s: since when it has its present placement.
        changes: how often its placement was changed or taken.
    """

    job: ClusterJob
    number: int
    worker: Amounts
    server: Amounts
    placement: JobPlacement | None = None
    started_s: float | None = None
    placed_s: float = 0.0
    changes: int = 0
    # Progress is kept as a line: what was reached at a moment, and the rate from there on.
    since_s: float = 0.0
    done_then: float = 0.0
    rate: float = 0.0
    worker_s_then: float = 0.0

    def done(self, now_s: float) -> float:
        """Samples trained."""
        return self.done_then + self.rate * max(now_s - self.since_s, 0.0)

    def left(self, now_s: float) -> float:
        """Samples still to train."""
        return max(self.job.samples - self.done(now_s), 0.0)

    def worker_s(self, now_s: float) -> float:
        """Attained service: workers by seconds."""
        workers = 0 if self.placement is None else self.placement.workers
        return self.worker_s_then + workers * max(now_s - self.placed_s, 0.0)

    def usage(self, placement: JobPlacement) -> Amounts:
        """Amounts that the placement takes, a row for each of its parts."""
        counts = np.array([(p.workers, p.servers) for p in placement.parts], dtype=np.float64)
        return counts @ np.stack([self.worker, self.server])


@dataclass(frozen=True)
class View:
    """The cluster at one moment. A policy must not change it.

    Attributes:
        free: free amounts, a row for each machine.
        waiting, running: jobs by name, in the order in which they began to wait and to run.
        arrived: those of the waiting ones that the policy has not seen before.
        slot_s: length of a slot, if placements last for whole slots; None: they may change at any
            time.
        resize_s: how long a job stands still when its placement changes.
    """

    now_s: float
    machines: Machines
    free: Amounts
    waiting: Mapping[str, JobState]
    running: Mapping[str, JobState]
    arrived: Sequence[JobState] = ()
    slot_s: float | None = None
    resize_s: float = 0.0


@dataclass
class PolicyDecision:
    """What changes.

    Attributes:
        place: new placements by job; None: it stops and waits. Jobs that are not named keep theirs.
        reject: jobs that will never run.
        wake_s: when the policy wants to be asked again, if nothing happens before.
    """

    place: dict[str, JobPlacement | None] = field(default_factory=dict)
    reject: list[str] = field(default_factory=list)
    wake_s: float | None = None


class ClusterPolicy(Protocol):
    """Decides which job runs where. May keep state of its own; one object for each run."""

    def decide(self, view: View) -> PolicyDecision:
        """Asked when jobs arrive or end, at the start of each slot, and when it wanted to be.

        With slots it is asked at their starts alone.
        """
        ...
