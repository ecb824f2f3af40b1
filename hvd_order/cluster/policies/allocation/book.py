"""How many workers each job can have, and how fast it would train with them."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from hvd_order.cluster.model.machines import Amounts
from hvd_order.cluster.policies.interface import JobState, PolicyDecision, View
from hvd_order.cluster.policies.packing import pack

__all__ = ["Book"]


class Book:
    """Remembers what it found out about each job in the cluster. One for each policy and run.

    Args:
        elastic: whether jobs can have up to ``Job.most`` workers, not the requested ones alone.
    """

    def __init__(self, *, elastic: bool) -> None:
        self._elastic = elastic
        self._workers: dict[int, int] = {}
        self._rates: dict[int, dict[tuple[int, int, int], float]] = {}
        self._parts: dict[int, list[tuple[float, float]]] = {}
        self._whole: Amounts = np.zeros(0)
        self._largest: Amounts = np.zeros(0)
        self._counted: NDArray[np.bool_] = np.zeros(0, dtype=bool)

    def jobs(self, view: View, decision: PolicyDecision) -> list[JobState]:
        """All jobs by arrival; rejects those that ``pack`` cannot place on empty machines."""
        capacity = view.machines.capacity
        if not len(self._whole):
            self._whole = capacity.sum(axis=0)
            self._largest = capacity.max(axis=0)
            self._counted = self._whole > 0
        states = [*view.running.values(), *view.waiting.values()]
        if len(self._workers) > 2 * len(states) + 64:
            here = {state.number for state in states}
            self._workers = {n: count for n, count in self._workers.items() if n in here}
            self._rates = {n: rates for n, rates in self._rates.items() if n in here}
            self._parts = {n: parts for n, parts in self._parts.items() if n in here}
        found = []
        for state in sorted(states, key=lambda s: s.number):
            if state.number not in self._workers:
                self._workers[state.number] = self._fitting(state, capacity)
                self._rates[state.number] = {}
            if self._workers[state.number]:
                found.append(state)
            elif state.placement is None:
                decision.reject.append(state.job.name)
        return found

    def _fitting(self, state: JobState, capacity: Amounts) -> int:
        job = state.job
        wanted = job.most if self._elastic else job.requested
        if pack(state, wanted, capacity) is not None:
            return wanted
        low, high = job.least - 1, wanted  # it is taken to fit with low, and not with high
        while high - low > 1:
            middle = (low + high) // 2
            if pack(state, middle, capacity) is None:
                high = middle
            else:
                low = middle
        return low if low >= job.least else 0

    def workers(self, state: JobState) -> int:
        """The workers that it asks for, or may have if it is elastic; fewer where the empty cluster
        does not hold them.
        """
        return self._workers[state.number]

    def share(self, state: JobState, workers: int, servers: int) -> float:
        """Dominant share: the largest part of all of a resource that they take."""
        parts = self._parts.get(state.number)
        if parts is None:
            demands = np.stack([state.worker, state.server])[:, self._counted]
            worker, server = (demands / self._whole[self._counted]).tolist()
            parts = self._parts[state.number] = list(zip(worker, server, strict=True))
        return max((workers * w + servers * s for w, s in parts), default=0.0)

    def machines(self, state: JobState, workers: int, servers: int) -> int:
        """An estimate from below of how many machines they need."""
        amounts = workers * state.worker + servers * state.server
        of_one = float((amounts[self._counted] / self._largest[self._counted]).max(initial=0.0))
        return max(math.ceil(of_one - 1e-9), 1)

    def rate(
        self, state: JobState, workers: int, servers: int | None = None, batch: int | None = None
    ) -> float:
        """Progress in samples/s on as few machines as can be.

        Args:
            servers: None: as few as the workers need.
            batch: samples of a step of all workers; None: as the job says.
        """
        job = state.job
        if servers is None:
            servers = job.servers_for(workers)
        size = batch or job.batch
        rates = self._rates[state.number]
        key = (workers, servers, size)
        if key not in rates:
            machines = self.machines(state, workers, servers)
            rate = job.speed.samples_per_s(workers, servers, machines, size)
            rates[key] = rate * job.efficiency(size)
        return rates[key]

    def remaining_s(self, view: View, state: JobState) -> float:
        """Time to its end with its workers, including what it stands still for if it stood."""
        rate = self.rate(state, self.workers(state))
        still_s = 0.0
        if state.placement is not None:
            still_s = max(state.since_s - view.now_s, 0.0)
        elif state.started_s is not None:
            still_s = view.resize_s
        return still_s + (state.left(view.now_s) / rate if rate > 0 else math.inf)
