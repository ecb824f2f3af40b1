"""ONES: how much a job may grow, when the search runs, and what becomes of its result."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hvd_order.cluster.model.job import ClusterJob
from hvd_order.cluster.policies.allocation.book import Book
from hvd_order.cluster.policies.interface import JobState, PolicyDecision, View
from hvd_order.cluster.policies.ones.score import Lengths, epoch_of
from hvd_order.cluster.policies.ones.search import PopulationMember, Problem, Search
from hvd_order.cluster.policies.packing import fit_count

__all__ = ["Ones", "batch_for"]

_LITTLE = 1e-3  # of an epoch: what a job has done at least, so that it has a progress
_FULL_EPOCHS = 2  # after which a limit doubles, and a mutation may take a job out
_MOST_REQUESTS = 4  # a limit over the requested workers, while others wait
_LEAST_WAKE_S = 1.0  # ONES breeds a generation a second


@dataclass
class _Record:
    """Of a job in the cluster.

    Attributes:
        limit: workers that it may have.
        since: samples that it had done when its schedule was last decided on.
        full_since: the same when it began to run with as many workers as it may have, or when its
            limit changed.
        rates: samples/s by number of workers, as far as they were needed.
    """

    job: ClusterJob
    limit: int
    since: float = 0.0
    full_since: float | None = None
    rates: list[float] = field(default_factory=list)


class Ones:
    """Searches for schedules with the least remaining worker-seconds; batches grow with workers.

    A new schedule is applied once each running job has trained an epoch under the present one;
    until then jobs that wait take what is free. New jobs get their fewest workers first.

    Limits start at the requested workers. That of a job that ran two epochs at its limit doubles,
    up to four times the request while others wait. If others wait, the largest job, if it has half
    of the places or more and ran longer than the median of all jobs, those that wait included,
    shrinks to 2 n / (run / median + 1) workers, rounded down to an even number.

    A worker's batch stays as the user set it until the job's largest batch is reached; beyond, it
    shrinks.

    Source: Bian et al., "Online Evolutionary Batch Size Orchestration for Scheduling Deep Learning
    Workloads in GPU Clusters", SC 2021, by its public code as read. Different here: generations are
    bred at decisions, not each second; progress is guessed without losses (``Lengths``); a job of
    unknown epochs is one epoch. Reconstructed: where limits start, the reading of "four times", and
    whose median it is.

    Args:
        seed: of all random choices.
        generations: at each decision that may change running jobs.
    """

    def __init__(self, seed: int = 0, generations: int = 4) -> None:
        self._rng = np.random.default_rng(seed)
        self._generations = generations
        self._book = Book(elastic=True)
        self._lengths = Lengths()
        self._records: dict[int, _Record] = {}
        self._ancestors: list[dict[int, int]] = []  # workers by number of the job
        self._places = np.zeros(0, dtype=np.int64)

    def decide(self, view: View) -> PolicyDecision:
        """Fills what is free, or searches if all running jobs have done their epoch."""
        decision = PolicyDecision()
        jobs = self._book.jobs(view, decision)
        self._meet(view, jobs)
        if not jobs:
            return decision
        self._limit(view, jobs)
        running = [state for state in jobs if state.placement is not None]
        ready = bool(running) and all(self._epoch_left(view, s) <= 0 for s in running)
        if not ready and not view.waiting:
            decision.wake_s = self._wake_s(view, running, decision)
            return decision
        problem = self._problem(view, jobs)
        search = Search(problem, self._rng)
        epochs = np.array([problem.done[j] / epoch_of(s.job) for j, s in enumerate(jobs)])
        to_come = np.array(
            [self._lengths.to_come(s.job, e) for s, e in zip(jobs, epochs, strict=True)]
        )
        guesses = [
            self._lengths.sample(epochs, to_come, self._rng)
            for _ in range(self._generations if ready else 1)
        ]
        if ready:
            ancestors = [
                np.array([workers.get(state.number, 0) for state in jobs], dtype=np.int64)
                for workers in self._ancestors
            ]
            population = search.run(ancestors, guesses)
            self._ancestors = [
                {state.number: int(n) for state, n in zip(jobs, member.counts, strict=True)}
                for member in population
            ]
            schedule = population[0]
        else:
            present = [0 if s.placement is None else s.placement.workers for s in jobs]
            counts = np.array(present, dtype=np.int64)
            schedule = search.place(search.pad(counts, search.order(guesses[0]), grow=False))
        self._apply(view, jobs, schedule, decision, ready)
        decision.wake_s = self._wake_s(view, jobs, decision)
        return decision

    # ---------------------------------------------------------------------------- jobs
    def _meet(self, view: View, jobs: Sequence[JobState]) -> None:
        """Learns from the jobs that ended, and gets to know new ones."""
        here = {state.number for state in jobs}
        for number in [number for number in self._records if number not in here]:
            self._lengths.ended(self._records.pop(number).job)
        if not len(self._places):
            self._places = np.zeros(len(view.machines), dtype=np.int64)
        for state in jobs:
            if state.number not in self._records:
                most = self._book.workers(state)
                limit = min(max(state.job.requested, state.job.least), most)
                self._records[state.number] = _Record(state.job, limit)
                room = np.minimum(fit_count(view.machines.capacity, state.worker), most)
                self._places = np.maximum(self._places, room)

    def _limit(self, view: View, jobs: Sequence[JobState]) -> None:
        now_s = view.now_s
        running = [state for state in jobs if state.placement is not None]
        for state in running:
            record = self._records[state.number]
            assert state.placement is not None
            if not self._is_full(state, state.placement.workers):
                record.full_since = None
                continue
            done = state.done(now_s)
            if record.full_since is None:
                record.full_since = done
            elif done - record.full_since >= _FULL_EPOCHS * epoch_of(state.job) * (1 - 1e-9):
                most = self._book.workers(state)
                if view.waiting:
                    most = min(most, max(_MOST_REQUESTS * state.job.requested, record.limit))
                record.limit = min(2 * record.limit, most)
                record.full_since = done
        if view.waiting and running:
            self._shrink_largest(view, jobs)

    def _shrink_largest(self, view: View, jobs: Sequence[JobState]) -> None:
        """Makes room for others at the cost of a job that has had much for long."""
        runs_s = [0.0 if s.started_s is None else view.now_s - s.started_s for s in jobs]
        median_s = statistics.median(runs_s)
        workers, _, run_s, largest = max(
            (state.placement.workers, -state.number, run_s, state)
            for state, run_s in zip(jobs, runs_s, strict=True) if state.placement is not None
        )  # fmt: skip
        if 2 * workers >= self._places.sum() and run_s > median_s:
            # Without a median, as most jobs never ran, nothing is left but its fewest.
            even = 2 * int(workers / (run_s / median_s + 1)) if median_s > 0 else 0
            self._records[largest.number].limit = max(even, largest.job.least)

    def _is_full(self, state: JobState, workers: int) -> bool:
        """Whether it has as many workers as it may have."""
        return workers >= self._useful(state, self._records[state.number].limit)

    def _useful(self, state: JobState, limit: int) -> int:
        """Fewest workers with which it is fastest, within the limit."""
        rates = self._rates(state, limit)
        return rates.index(max(rates))

    def _rates(self, state: JobState, limit: int) -> list[float]:
        """Samples/s by number of workers, up to the limit; 0 for too few of them."""
        rates = self._records[state.number].rates
        for n in range(len(rates), limit + 1):
            batch = batch_for(state.job, n)
            rates.append(self._book.rate(state, n, None, batch) if n >= state.job.least else 0.0)
        return rates[: limit + 1]

    def _epoch_left(self, view: View, state: JobState) -> float:
        """Samples until it has trained an epoch since its schedule was decided on."""
        epoch = epoch_of(state.job)
        trained = state.done(view.now_s) - self._records[state.number].since
        return 0.0 if trained >= epoch * (1 - 1e-9) else epoch - trained

    # ---------------------------------------------------------------------------- schedules
    def _problem(self, view: View, jobs: Sequence[JobState]) -> Problem:
        limits = [self._useful(state, self._records[state.number].limit) for state in jobs]
        rates = np.zeros((len(jobs), max(limits) + 1))
        for j, state in enumerate(jobs):
            rates[j, : limits[j] + 1] = self._rates(state, limits[j])
        done = [max(s.done(view.now_s), _LITTLE * epoch_of(s.job)) for s in jobs]
        return Problem(
            jobs,
            np.array([state.job.least for state in jobs], dtype=np.int64),
            np.array(limits, dtype=np.int64),
            rates,
            np.array(done),
            np.array([state.started_s is None for state in jobs]),
            np.array(
                [s.done(view.now_s) >= _FULL_EPOCHS * epoch_of(s.job) * (1 - 1e-9) for s in jobs]
            ),
            view.resize_s,
            view.free,
            self._places,
        )

    def _apply(
        self,
        view: View,
        jobs: Sequence[JobState],
        schedule: PopulationMember,
        decision: PolicyDecision,
        ready: bool,
    ) -> None:
        for j, state in enumerate(jobs):
            placement = schedule.placements.get(j)
            if placement is not None and placement != state.placement:
                batch = batch_for(state.job, placement.workers)
                placement = replace(placement, batch=None if batch == state.job.batch else batch)
            if placement != state.placement:
                decision.place[state.job.name] = placement
            if ready or placement != state.placement:
                record = self._records[state.number]
                record.since = state.done(view.now_s)
                if placement != state.placement:
                    record.full_since = None
                    if placement is not None and self._is_full(state, placement.workers):
                        record.full_since = record.since

    def _wake_s(
        self, view: View, jobs: Sequence[JobState], decision: PolicyDecision
    ) -> float | None:
        """When all running jobs will have done their epoch; None: nothing runs."""
        after_s = []
        for state in jobs:
            placement = decision.place.get(state.job.name, state.placement)
            if placement is None:
                continue
            rate = state.job.samples_per_s(placement)
            still_s = max(state.since_s - view.now_s, 0.0)
            if placement is not state.placement:
                still_s = 0.0 if state.started_s is None else view.resize_s
            if rate > 0:
                after_s.append(still_s + self._epoch_left(view, state) / rate)
        longest_s = max(after_s, default=math.inf)
        return None if longest_s == math.inf else view.now_s + max(longest_s, _LEAST_WAKE_S)


def batch_for(job: ClusterJob, workers: int) -> int:
    """Samples of a step: a worker's batch stays until the largest batch of all is reached."""
    grown = round(job.batch * workers / job.requested)
    return max(min(grown, job.most_batch or job.batch), 1)
