"""Runs jobs under a policy in virtual time."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from hvd_order.base.errors import InvalidUsage
from hvd_order.cluster.model.job import ClusterJob
from hvd_order.cluster.model.machines import Machines
from hvd_order.cluster.model.placement import JobPlacement
from hvd_order.cluster.policies.interface import ClusterPolicy, JobState, PolicyDecision, View
from hvd_order.cluster.simulate.contention import Contention
from hvd_order.cluster.simulate.outcome import JobOutcome, PlacementInterval, Summary

__all__ = ["Rates", "Rules", "simulate"]

Rates = Callable[[Mapping[str, JobState]], Mapping[str, float]]
"""Samples a second of all running jobs, where jobs slow one another down."""

_CLOSE = 1e-9  # relative; a job that has so little left has ended


@dataclass(frozen=True)
class Rules:
    """Rules of a run.

    Attributes:
        slot_s: length of a slot: the policy is asked at the starts of slots alone, and utilities
            count whole slots; None: it is asked whenever something happens.
        until_s: end of the run; jobs that have not ended by then are worth nothing.
        start_s: time from a job's first placement to its first sample.
        resize_s: time for which a job stands still after a later change.
        keep_placements: whether outcomes hold the placements, for pictures.
    """

    slot_s: float | None = None
    until_s: float = math.inf
    start_s: float = 0.0
    resize_s: float = 0.0
    keep_placements: bool = False

    def __post_init__(self) -> None:
        if self.slot_s is not None and not 0 < self.slot_s < math.inf:
            raise InvalidUsage(f"slots of {self.slot_s} s; expected more than 0")
        if self.start_s < 0 or self.resize_s < 0:
            raise InvalidUsage(f"a start takes {self.start_s} s and a resize {self.resize_s} s; "
                               "neither may be negative")  # fmt: skip


def simulate(
    jobs: Iterable[ClusterJob],
    machines: Machines,
    policy: ClusterPolicy,
    rules: Rules | None = None,
    *,
    rates: Rates | None = None,
    ended: Callable[[JobOutcome], None] | None = None,
) -> Summary:
    """Runs all jobs, or until ``rules.until_s``.

    Memory grows with the jobs that are in the cluster at a time, and a few numbers for each job.

    Args:
        jobs: by time of arrival; read as time goes on.
        rates: speeds of jobs that share links; None: each job by itself, as
            ``ClusterJob.samples_per_s`` says.
        ended: called with each job that ends or is rejected, and at the end with the others.

    Raises:
        InvalidUsage: jobs are out of order, or the policy does something impossible, or waits for
            nothing while jobs wait.
    """
    return _Simulator(jobs, machines, policy, rules or Rules(), rates, ended).run()


class _Simulator:
    def __init__(
        self,
        jobs: Iterable[ClusterJob],
        machines: Machines,
        policy: ClusterPolicy,
        rules: Rules,
        rates: Rates | None,
        ended: Callable[[JobOutcome], None] | None,
    ) -> None:
        self._jobs = iter(jobs)
        self._machines = machines
        self._policy = policy
        self._rules = rules
        self._rates = rates
        self._ended = ended
        self._now_s = 0.0
        self._next_job = next(self._jobs, None)
        self._count = 0
        self._free = machines.capacity.copy()
        self._waiting: dict[str, JobState] = {}
        self._running: dict[str, JobState] = {}
        self._arrived: list[JobState] = []
        self._ends: list[tuple[float, int, int, str]] = []  # time, number, version, name
        self._version: dict[str, int] = {}
        self._placements: dict[str, list[PlacementInterval]] = {}
        self._wake_s = math.inf
        self._summary = Summary(
            capacity=dict(zip(machines.resources, machines.capacity.sum(axis=0), strict=True))
        )
        self._used = np.zeros(len(machines.resources))
        self._contention = Contention(machines)

    def run(self) -> Summary:
        while self._step():
            pass
        for state in sorted([*self._waiting.values(), *self._running.values()],
                            key=lambda s: s.number):  # fmt: skip
            self._leave(state, None, rejected=False)
        used = dict(zip(self._machines.resources, map(float, self._used), strict=True))
        self._summary.used = used
        return self._summary

    # ---------------------------------------------------------------------------------- time
    def _step(self) -> bool:
        """Goes to the next moment at which something happens. Returns whether there was one."""
        arrival_s = math.inf if self._next_job is None else self._next_job.arrival_s
        while self._ends and self._version.get(self._ends[0][3]) != self._ends[0][2]:
            heapq.heappop(self._ends)
        end_s = self._ends[0][0] if self._ends else math.inf
        ask_s = (
            min(arrival_s, end_s, self._wake_s)
            if self._rules.slot_s is None
            else self._slot(arrival_s)
        )
        at_s = min(ask_s, end_s)
        if at_s > self._rules.until_s or at_s == math.inf:
            if at_s == math.inf and self._waiting and self._rules.until_s == math.inf:
                name = next(iter(self._waiting))
                raise InvalidUsage(f"the policy lets job {name!r} wait, and nothing will happen "
                                   "that could change it")  # fmt: skip
            if self._rules.until_s < math.inf:
                self._advance(self._rules.until_s)
            return False
        self._advance(at_s)
        while self._ends and self._ends[0][0] <= at_s:
            _, _, version, name = heapq.heappop(self._ends)
            if self._version.get(name) == version:
                self._leave(self._running[name], at_s, rejected=False)
        if ask_s <= at_s:
            self._admit()
            self._ask()
        elif self._rates is not None:
            self._refresh()
        return True

    def _slot(self, arrival_s: float) -> float:
        """Start of the next slot in which there is something to decide."""
        slot_s = self._rules.slot_s or 0.0
        if self._waiting or self._running:
            return self._start_of(math.floor(self._now_s / slot_s + _CLOSE) + 1)
        if arrival_s == math.inf:
            return math.inf
        # What arrives in a slot is seen at its start if it comes exactly then, else at the next.
        return max(self._start_of(math.ceil(arrival_s / slot_s - _CLOSE)), self._now_s)

    def _start_of(self, slot: int) -> float:
        return slot * (self._rules.slot_s or 0.0)

    def _advance(self, at_s: float) -> None:
        passed = at_s - self._now_s
        if passed > 0:
            self._used += passed * (self._machines.capacity - self._free).sum(axis=0)
            self._contention.advance(passed)
            self._now_s = at_s

    # ---------------------------------------------------------------------------------- jobs
    def _admit(self) -> None:
        while self._next_job is not None and self._next_job.arrival_s <= self._now_s + _CLOSE:
            job = self._next_job
            self._next_job = next(self._jobs, None)
            if self._next_job is not None and self._next_job.arrival_s < job.arrival_s:
                raise InvalidUsage(f"job {self._next_job.name!r} arrives before {job.name!r}, "
                                   "which stands in front of it")  # fmt: skip
            if job.name in self._version:
                raise InvalidUsage(f"two jobs are called {job.name!r}")
            state = JobState(
                job,
                self._count,
                self._machines.amounts(job.worker),
                self._machines.amounts(job.server),
            )
            self._count += 1
            self._waiting[job.name] = state
            self._arrived.append(state)
            self._version[job.name] = 0
            self._contention.add(state)

    def _ask(self) -> None:
        view = View(
            self._now_s, self._machines, self._free, self._waiting, self._running,
            tuple(self._arrived), self._rules.slot_s, self._rules.resize_s,
        )  # fmt: skip
        self._arrived = []
        begin = time.process_time()
        decision = self._policy.decide(view)
        taken = time.process_time() - begin
        self._summary.decisions += 1
        self._summary.decision_s += taken
        self._summary.longest_decision_s = max(self._summary.longest_decision_s, taken)
        self._apply(decision)
        self._wake_s = math.inf if decision.wake_s is None else decision.wake_s
        if self._wake_s <= self._now_s:
            raise InvalidUsage(f"at {self._now_s} s the policy wants to be asked at "
                               f"{self._wake_s} s again; expected a later time")  # fmt: skip

    def _apply(self, decision: PolicyDecision) -> None:
        changed = []
        for name, placement in decision.place.items():
            state = self._running.get(name) or self._waiting.get(name)
            if state is None:
                raise InvalidUsage(f"the policy places job {name!r}, which is not in the cluster")
            if state.placement == placement:
                continue
            if state.placement is not None:
                self._stop(state)
            changed.append((state, placement))
        for state, placement in changed:
            if placement is not None:
                self._start(state, placement)
        if (self._free < -1e-6).any():
            machine, resource = map(int, np.argwhere(self._free < -1e-6)[0])
            raise InvalidUsage(
                f"at {self._now_s} s the policy takes more of "
                f"{self._machines.resources[resource]!r} than machine "
                f"{self._machines.machines[machine].name!r} has"
            )
        for name in decision.reject:
            state = self._waiting.get(name)
            if state is None:
                raise InvalidUsage(f"the policy rejects job {name!r}, which does not wait")
            self._leave(state, None, rejected=True)
        if self._rates is not None:
            self._refresh()

    def _start(self, state: JobState, placement: JobPlacement) -> None:
        name = state.job.name
        self._free[[part.machine for part in placement.parts]] -= state.usage(placement)
        self._waiting.pop(name, None)
        self._running[name] = state
        state.placement = placement
        state.placed_s = self._now_s
        first = state.started_s is None
        if first:
            state.started_s = self._now_s
        state.done_then = state.done(self._now_s)
        state.since_s = self._now_s + (self._rules.start_s if first else self._rules.resize_s)
        state.rate = 0.0
        if self._rates is None:
            self._set_rate(state, state.job.samples_per_s(placement))

    def _stop(self, state: JobState) -> None:
        """Takes the placement of a running job, which waits again."""
        placement, name = state.placement, state.job.name
        assert placement is not None
        self._free[[part.machine for part in placement.parts]] += state.usage(placement)
        state.worker_s_then = state.worker_s(self._now_s)
        state.done_then = state.done(self._now_s)
        state.since_s = self._now_s
        state.rate = 0.0
        state.placement = None
        state.changes += 1
        self._version[name] += 1
        if self._rules.keep_placements:
            self._keep(state, placement)
        del self._running[name]
        self._waiting[name] = state

    def _set_rate(self, state: JobState, rate: float) -> None:
        if rate == state.rate:
            return
        name = state.job.name
        state.done_then = state.done(self._now_s)
        state.since_s = max(state.since_s, self._now_s)
        state.rate = rate
        self._version[name] += 1
        if rate > 0:
            left_s = max(state.job.samples - state.done_then, 0.0) / rate
            heapq.heappush(
                self._ends, (state.since_s + left_s, state.number, self._version[name], name)
            )

    def _refresh(self) -> None:
        assert self._rates is not None
        for name, rate in self._rates(self._running).items():
            self._set_rate(self._running[name], rate)

    def _keep(self, state: JobState, placement: JobPlacement) -> None:
        if self._now_s > state.placed_s:
            self._placements.setdefault(state.job.name, []).append(
                PlacementInterval(state.placed_s, self._now_s, placement.parts)
            )

    def _leave(self, state: JobState, ended_s: float | None, *, rejected: bool) -> None:
        job, name = state.job, state.job.name
        if state.placement is not None:
            changes = state.changes
            self._stop(state)
            state.changes = changes
        del self._waiting[name]
        del self._version[name]
        contended = self._contention.remove(name)
        fairness = None
        utility = 0.0
        if ended_s is not None:
            utility = job.utility(self._latency(job.arrival_s, ended_s))
            here_s = ended_s - job.arrival_s
            alone_s = job.alone_s()
            if here_s > 0 and alone_s > 0:
                fairness = here_s / (alone_s * contended / here_s)
        outcome = JobOutcome(
            name, job.model, job.arrival_s, state.started_s, ended_s, rejected, utility,
            state.worker_s_then, state.changes, fairness, tuple(self._placements.pop(name, ())),
        )  # fmt: skip
        self._summary.add(outcome)
        if self._ended is not None:
            self._ended(outcome)

    def _latency(self, arrival_s: float, ended_s: float) -> float:
        """With slots: whole slots between that of the arrival and that of the end."""
        slot_s = self._rules.slot_s
        if slot_s is None:
            return ended_s - arrival_s
        first = math.ceil(arrival_s / slot_s - _CLOSE)
        last = math.ceil(ended_s / slot_s - _CLOSE) - 1
        return max(last - first, 0) * slot_s
