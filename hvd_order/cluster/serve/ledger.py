"""What a policy has decided about the jobs of a real cluster, and what became of them.

Pure bookkeeping: every method is told the time, in seconds since the first start. A journal can
therefore be played again (journal.py).
"""

from __future__ import annotations

import numpy as np

from hvd_order.base.errors import InvalidUsage
from hvd_order.cluster.model.job import ClusterJob, check_job
from hvd_order.cluster.model.machines import Machines
from hvd_order.cluster.model.placement import JobPlacement
from hvd_order.cluster.policies.interface import JobState, PolicyDecision, View
from hvd_order.cluster.simulate.outcome import JobOutcome

__all__ = ["Ledger"]


class Ledger:
    """Jobs of a cluster, as a policy sees them.

    Args:
        slot_s: length of a slot; None: no slots.
        resize_s: for which a job that starts or changes stands still, as is believed.

    Attributes:
        waiting, running: jobs by name, as in `View`.
        outcomes: of jobs that have left, in their order.
    """

    def __init__(self, machines: Machines, slot_s: float | None, resize_s: float) -> None:
        self.waiting: dict[str, JobState] = {}
        self.running: dict[str, JobState] = {}
        self.outcomes: list[JobOutcome] = []
        self._machines = machines
        self._slot_s = slot_s
        self._resize_s = resize_s
        self._free = machines.capacity.copy()
        self._count = 0
        self._arrived: list[JobState] = []
        # Requested share of the cluster, at least 1, as an integral over time: for fairness.
        self._contended = 0.0
        self._contended_at: dict[str, float] = {}
        self._at_s = 0.0

    def state(self, name: str) -> JobState | None:
        """Of a job that has not left."""
        return self.running.get(name) or self.waiting.get(name)

    def arrive(self, job: ClusterJob, now_s: float) -> None:
        """A job is submitted.

        Raises:
            InvalidUsage: the empty cluster could not hold it.
        """
        check_job(job, self._machines)
        self._advance(now_s)
        state = JobState(job, self._count, self._machines.amounts(job.worker),
                         self._machines.amounts(job.server))  # fmt: skip
        self._count += 1
        self.waiting[job.name] = state
        self._arrived.append(state)
        self._contended_at[job.name] = self._contended

    def view(self, now_s: float) -> View:
        """What the policy is asked with. A job is new to it once."""
        arrived, self._arrived = tuple(self._arrived), []
        return View(now_s, self._machines, self._free, self.waiting, self.running, arrived,
                    self._slot_s, self._resize_s)  # fmt: skip

    def changed_by(self, decision: PolicyDecision) -> bool:
        """Whether a decision gives or takes anything."""
        states = ((self.state(name), placement) for name, placement in decision.place.items())
        return any(state is None or state.placement != place for state, place in states)

    def apply(self, decision: PolicyDecision, now_s: float) -> None:
        """Takes a decision down.

        Raises:
            InvalidUsage: it is impossible.
        """
        self._advance(now_s)
        changed = []
        for name, placement in decision.place.items():
            state = self.state(name)
            if state is None:
                raise InvalidUsage(f"the policy places job {name!r}, which is not in the cluster")
            if state.placement != placement:
                self._take(state, now_s)
                changed.append((state, placement))
        for state, placement in changed:
            if placement is not None:
                self._give(state, placement, now_s)
        if (self._free < -1e-6).any():
            machine = int(np.argwhere(self._free < -1e-6)[0][0])
            raise InvalidUsage("the policy takes more than machine "
                               f"{self._machines.machines[machine].name!r} has")  # fmt: skip
        for name in decision.reject:
            if name not in self.waiting:
                raise InvalidUsage(f"the policy rejects job {name!r}, which does not wait")
            self.leave(name, now_s, ended=False, rejected=True)

    def progress(self, name: str, samples: float, now_s: float) -> None:
        """A job has told how many samples it has trained; the estimate goes on from there."""
        state = self.running[name]
        state.done_then, state.since_s = samples, now_s

    def leave(self, name: str, now_s: float, *, ended: bool, rejected: bool = False) -> JobOutcome:
        """A job has completed, was rejected, or is given up."""
        self._advance(now_s)
        state = self.running.get(name) or self.waiting[name]
        changes = state.changes
        self._take(state, now_s)
        del self.waiting[name]
        self._arrived = [each for each in self._arrived if each is not state]
        job, here_s = state.job, now_s - state.job.arrival_s
        contended = self._contended - self._contended_at.pop(name)
        fair = ended and here_s > 0 and contended > 0
        outcome = JobOutcome(
            name, job.model, job.arrival_s, state.started_s, now_s if ended else None, rejected,
            job.utility(here_s) if ended else 0.0, state.worker_s_then, changes,
            here_s * here_s / (job.alone_s() * contended) if fair else None,
        )  # fmt: skip
        self.outcomes.append(outcome)
        return outcome

    def _give(self, state: JobState, placement: JobPlacement, now_s: float) -> None:
        name = state.job.name
        self._free[[part.machine for part in placement.parts]] -= state.usage(placement)
        del self.waiting[name]
        self.running[name] = state
        state.placement, state.placed_s = placement, now_s
        if state.started_s is None:
            state.started_s = now_s
        state.since_s = now_s + self._resize_s
        state.rate = state.job.samples_per_s(placement)

    def _take(self, state: JobState, now_s: float) -> None:
        """Takes the placement of a job, which waits then."""
        if state.placement is None:
            return
        placement, name = state.placement, state.job.name
        self._free[[part.machine for part in placement.parts]] += state.usage(placement)
        state.worker_s_then = state.worker_s(now_s)
        state.done_then = state.done(now_s)
        state.since_s, state.rate, state.placement = now_s, 0.0, None
        state.changes += 1
        del self.running[name]
        self.waiting[name] = state

    def _advance(self, now_s: float) -> None:
        states = (*self.waiting.values(), *self.running.values())
        slots = float(self._machines.capacity.sum())
        wanted = sum(state.job.requested for state in states) / slots
        self._contended += max(now_s - self._at_s, 0.0) * max(wanted, 1.0)
        self._at_s = max(self._at_s, now_s)
