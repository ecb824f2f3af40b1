"""Dominant resource fairness."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from hvd_order.cluster.model.machines import Amounts
from hvd_order.cluster.policies.allocation.book import Book
from hvd_order.cluster.policies.allocation.filling import Filling
from hvd_order.cluster.policies.allocation.realise import Target, realise
from hvd_order.cluster.policies.interface import JobState, PolicyDecision, View

__all__ = ["Drf", "fair_targets", "in_turn"]


class Drf:
    """Gives all jobs the same dominant share, as far as whole workers allow, up to ``Job.most``.

    Worked out anew at each decision; ``realise`` says when a running job then changes.

    Source: Ghodsi et al., "Dominant Resource Fairness", NSDI 2011, algorithm 1, with one user a job
    and one worker, with the servers that it needs, a task.
    """

    def __init__(self) -> None:
        self._book = Book(elastic=True)

    def decide(self, view: View) -> PolicyDecision:
        """Fills the machines in thought, then for real."""
        decision = PolicyDecision()
        jobs = self._book.jobs(view, decision)
        targets = fair_targets(self._book, jobs, view.machines.capacity)
        decision.place = realise(view, in_turn(jobs, targets))
        return decision


def fair_targets(book: Book, jobs: Sequence[JobState], free: Amounts) -> dict[str, Target]:
    """Workers by job: each time one to the job with the smallest dominant share, the first one of
    equals; a job's first are ``Job.least`` of them. Ends when nothing fits any more.
    """
    filling = Filling(free, jobs)
    targets = {state.job.name: Target(0, 0) for state in jobs}
    turns = [(0.0, index) for index in range(len(jobs))]
    while turns:
        _, index = heapq.heappop(turns)
        state = jobs[index]
        job = state.job
        workers, servers = targets[job.name]
        more = job.least if workers == 0 else 1
        then = Target(workers + more, job.servers_for(workers + more))
        give = filling.more if workers else filling.first
        if then.workers > book.workers(state) or not give(state, more, then.servers - servers):
            continue
        targets[job.name] = then
        heapq.heappush(turns, (book.share(state, *then), index))
    return targets


def in_turn(jobs: Sequence[JobState], targets: dict[str, Target]) -> dict[str, Target]:
    """The targets of waiting jobs first: what starts is worth more than what grows."""
    order = sorted(jobs, key=lambda state: (state.placement is not None, state.number))
    return {state.job.name: targets[state.job.name] for state in order}
