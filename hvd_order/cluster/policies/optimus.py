"""Optimus: workers and servers by marginal gain."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from hvd_order.cluster.model.machines import Amounts
from hvd_order.cluster.model.placement import JobPlacement
from hvd_order.cluster.policies.allocation.book import Book
from hvd_order.cluster.policies.allocation.filling import Filling
from hvd_order.cluster.policies.allocation.realise import Target, realise
from hvd_order.cluster.policies.interface import JobState, PolicyDecision, View
from hvd_order.cluster.policies.packing import pack

__all__ = ["Optimus", "spread"]

_NEVER_S = 1e300  # finite: differences of it are numbers


class Optimus:
    """Gives the next worker or server to the job whose remaining time falls most for it, per
    dominant share of what it gets.

    Each job first gets its fewest workers and their servers, in order of arrival. A step adds one
    worker with the servers that it needs, or one server, as long as a job has fewer servers than
    workers. Jobs are placed by size, the smallest first, each evenly on the fewest machines.

    Source: Peng et al., "Optimus", EuroSys 2018, sections 4.1 and 4.2. Speeds and what is left are
    known here; Optimus estimates both while jobs train.
    """

    def __init__(self) -> None:
        self._book = Book(elastic=True)

    def decide(self, view: View) -> PolicyDecision:
        """Works out the numbers for all jobs, then places those that change."""
        decision = PolicyDecision()
        jobs = self._book.jobs(view, decision)
        targets = self._targets(view, jobs)

        def size(state: JobState) -> tuple[float, int]:
            return self._book.share(state, *targets[state.job.name]), state.number

        order = [state.job.name for state in sorted(jobs, key=size)]
        decision.place = realise(view, {name: targets[name] for name in order}, spread)
        return decision

    def _targets(self, view: View, jobs: Sequence[JobState]) -> dict[str, Target]:
        filling = Filling(view.machines.capacity, jobs)
        targets: dict[str, Target] = {}
        steps: list[tuple[float, int, Target]] = []
        for index, state in enumerate(jobs):
            job = state.job
            least = Target(job.least, job.servers_for(job.least))
            fits = filling.first(state, *least)
            targets[job.name] = least if fits else Target(0, 0)
            if fits:
                steps += self._step(view, state, index, least)
        heapq.heapify(steps)
        while steps:
            _, index, then = heapq.heappop(steps)
            state = jobs[index]
            workers, servers = targets[state.job.name]
            if filling.more(state, then.workers - workers, then.servers - servers):
                targets[state.job.name] = then
                for step in self._step(view, state, index, then):
                    heapq.heappush(steps, step)
        return targets

    def _step(
        self, view: View, state: JobState, index: int, now: Target
    ) -> list[tuple[float, int, Target]]:
        """The step of a job that gains most, with its gain below zero; nothing if none gains."""
        job = state.job
        options = []
        if now.workers < self._book.workers(state):
            more = now.workers + 1
            options.append(Target(more, max(job.servers_for(more), now.servers)))
        if job.workers_per_server is not None and now.servers < now.workers:
            options.append(Target(now.workers, now.servers + 1))
        best: tuple[float, int, Target] | None = None
        for then in options:
            gain_s = self._remaining_s(view, state, now) - self._remaining_s(view, state, then)
            added = self._book.share(state, then.workers - now.workers, then.servers - now.servers)
            gain = gain_s / max(added, 1e-12)
            if gain > 0 and (best is None or -gain < best[0]):
                best = (-gain, index, then)
        return [] if best is None else [best]

    def _remaining_s(self, view: View, state: JobState, target: Target) -> float:
        """What another number than the present one costs counts, so that jobs do not change to
        and fro.
        """
        rate = self._book.rate(state, *target)
        placement = state.placement
        changes = placement is not None and (placement.workers, placement.servers) != target
        left_s = state.left(view.now_s) / rate if rate > 0 else _NEVER_S
        return left_s + (view.resize_s if changes else 0.0)


def spread(
    state: JobState, workers: int, free: Amounts, servers: int | None = None
) -> JobPlacement | None:
    """Places workers and servers evenly on the fewest machines that hold them so, those with the
    most room first; as ``pack`` does where they fit only unevenly.

    Source: Peng et al., "Optimus", EuroSys 2018, section 4.2 (theorem 1).
    """
    if servers is None:
        servers = state.job.servers_for(workers)
    both = state.worker + state.server
    needed = both > 0
    if not needed.any():
        return pack(state, workers, free, servers)
    order = np.argsort(-(free[:, needed] / both[needed]).min(axis=1), kind="stable")
    ranked = free[order]
    for count in range(1, min(len(order), workers + servers) + 1):
        # The first machines have the most room: they take what is over of both.
        w = np.full(count, workers // count)
        w[: workers % count] += 1
        s = np.full(count, servers // count)
        s[: servers % count] += 1
        taken = w[:, None] * state.worker + s[:, None] * state.server
        if (ranked[:count] >= taken - 1e-9).all():
            return JobPlacement.of(
                [(int(m), int(a), int(b)) for m, a, b in zip(order[:count], w, s, strict=True)]
            )
    return pack(state, workers, free, servers)
