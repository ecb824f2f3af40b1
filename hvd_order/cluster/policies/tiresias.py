"""Tiresias: least attained service in two queues."""

from __future__ import annotations

import math

from hvd_order.base.errors import InvalidUsage
from hvd_order.cluster.policies.allocation.book import Book
from hvd_order.cluster.policies.allocation.ranking import by_rank
from hvd_order.cluster.policies.interface import JobState, PolicyDecision, View

__all__ = ["Tiresias"]


class Tiresias:
    """Runs the jobs that have had little service first, the older ones first among them; knows
    nothing of how long jobs take.

    The service of a job counts in two dimensions: accelerators by time. It is discretised: jobs
    below the threshold are in the first queue, the others in the second, and a job changes its
    queue once at most.

    Source: Gu et al., "Tiresias: A GPU Cluster Manager for Distributed Deep Learning", NSDI 2019,
    and the two queues of the copy that came with Qiao et al., "Pollux", OSDI 2021. Without the
    Gittins index and the promotion of jobs that starve.

    Args:
        threshold_s: service that ends a job's time in the first queue, in accelerators ("gpu") by
            seconds, or in workers by seconds for jobs without accelerators.

    Raises:
        InvalidUsage: the threshold is not positive.
    """

    def __init__(self, threshold_s: float = 16 * 3600.0) -> None:
        if not threshold_s > 0:
            raise InvalidUsage(f"a threshold of {threshold_s} accelerator-seconds between the "
                               "queues; expected more than 0")  # fmt: skip
        self._threshold_s = threshold_s
        self._book = Book(elastic=False)

    def decide(self, view: View) -> PolicyDecision:
        """Ranks all jobs by queue and arrival."""
        decision = PolicyDecision()
        jobs = self._book.jobs(view, decision)
        second = {
            state.number for state in jobs
            if self._service_left(view, state) <= 1e-9 * self._threshold_s
        }  # fmt: skip
        ranked = sorted(jobs, key=lambda state: (state.number in second, state.number))
        decision.place = by_rank(view, ranked, self._book.workers)
        # A job that goes to the second queue may have to stop for one that waits.
        running = [
            state for state in jobs
            if decision.place.get(state.job.name, state.placement) and state.number not in second
        ]  # fmt: skip
        if len(running) < len(jobs):
            after_s = min((self._until_second_s(view, state) for state in running), default=None)
            if after_s is not None:
                decision.wake_s = max(view.now_s + after_s, math.nextafter(view.now_s, math.inf))
        return decision

    def _service_left(self, view: View, state: JobState) -> float:
        """Service until it leaves the first queue."""
        return self._threshold_s - state.worker_s(view.now_s) * _weight(state)

    def _until_second_s(self, view: View, state: JobState) -> float:
        return self._service_left(view, state) / (self._book.workers(state) * _weight(state))


def _weight(state: JobState) -> float:
    """Accelerators of a worker."""
    return state.job.worker.get("gpu", 0.0) or 1.0
