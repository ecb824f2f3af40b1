"""Finish-time fairness: machines for the jobs that fare worst."""

from __future__ import annotations

import math

from hvd_order.base.errors import InvalidUsage
from hvd_order.cluster.policies.allocation.book import Book
from hvd_order.cluster.policies.allocation.ranking import by_rank
from hvd_order.cluster.policies.interface import JobState, PolicyDecision, View

__all__ = ["FinishTime"]

_ROUND_OF_RESIZES = 10  # a job that is swapped each round still trains nine tenths of the time


class FinishTime:
    """Gives the machines, in rounds, to the jobs with the worst finish-time fairness.

    That of a job is the time from its arrival to its end, if it ran from now on, over the time that
    it would take with its share of the cluster: 1/N, where N is the mean number of jobs while it
    was there. Between the rounds waiting jobs take what is free, and none stops.

    Source: Mahajan et al., "Themis", NSDI 2020 (metric), and Narayanan et al., "Gavel", OSDI 2020
    (rounds of 360 s). Neither Themis' auction nor Gavel's linear programme: the worst ones first.

    Args:
        round_s: length of a round; at least ten times as long as a resize, whatever is said here.

    Raises:
        InvalidUsage: the length is not positive.
    """

    def __init__(self, round_s: float = 360.0) -> None:
        if not round_s > 0:
            raise InvalidUsage(f"rounds of {round_s} s; expected more than 0")
        self._round_s = round_s
        self._book = Book(elastic=False)
        self._next_s = 0.0
        # Number of jobs as an integral over time, and where it was when each job was first seen.
        self._counted_s = 0.0
        self._jobs = 0
        self._job_s = 0.0
        self._seen: dict[int, tuple[float, float]] = {}

    def decide(self, view: View) -> PolicyDecision:
        """Ranks all jobs if a round begins, else the waiting ones."""
        decision = PolicyDecision()
        jobs = self._book.jobs(view, decision)
        self._count(view, jobs)
        fairness = {state.number: self._fairness(view, state) for state in jobs}
        round_begins = view.now_s >= self._next_s - 1e-9 * self._round_s
        ranked = sorted(
            jobs,
            key=lambda state: (
                state.placement is None and not round_begins,
                -fairness[state.number],
                state.placement is None,
                state.number,
            ),
        )
        decision.place = by_rank(view, ranked, self._book.workers)
        if round_begins:
            self._next_s = view.now_s + max(self._round_s, _ROUND_OF_RESIZES * view.resize_s)
        if any(not decision.place.get(s.job.name, s.placement) for s in jobs):
            decision.wake_s = self._next_s
        return decision

    def _count(self, view: View, jobs: list[JobState]) -> None:
        self._job_s += self._jobs * (view.now_s - self._counted_s)
        self._counted_s = view.now_s
        self._jobs = len(jobs)
        first = (view.now_s, self._job_s)
        self._seen = {state.number: self._seen.get(state.number, first) for state in jobs}

    def _fairness(self, view: View, state: JobState) -> float:
        seen_s, job_s = self._seen[state.number]
        here_s = view.now_s - seen_s
        mean_jobs = (self._job_s - job_s) / here_s if here_s > 0 else float(self._jobs)
        workers = self._book.workers(state)
        share = self._book.share(state, workers, state.job.servers_for(workers))
        own = workers if share <= 0 else min(workers, workers / (share * mean_jobs))
        # Less than one worker of one's own is one worker for a part of the time.
        whole = max(int(own + 1e-9), 1)
        rate = self._book.rate(state, whole) * min(own / whole, 1.0)
        alone_s = state.job.samples / rate if rate > 0 else math.inf
        elapsed_s = view.now_s - state.job.arrival_s
        if alone_s <= 0 or alone_s == math.inf:
            return 0.0
        return (elapsed_s + self._book.remaining_s(view, state)) / alone_s
