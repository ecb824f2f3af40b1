"""How much of the cluster the jobs in it ask for, which finish-time fairness is measured by."""

from __future__ import annotations

from hvd_order.cluster.model.machines import Machines
from hvd_order.cluster.policies.interface import JobState

__all__ = ["Contention"]


class Contention:
    """Sum of the requested shares of the jobs in the cluster, at least 1, as an integral over time.

    A job's share is the largest of any resource.
    """

    def __init__(self, machines: Machines) -> None:
        self._whole = machines.capacity.sum(axis=0)
        self._requested: dict[str, float] = {}
        self._sum = 0.0
        self._integral = 0.0
        self._integral_then: dict[str, float] = {}

    def add(self, state: JobState) -> None:
        """A job arrives."""
        job = state.job
        amounts = job.requested * state.worker + job.servers_for(job.requested) * state.server
        there = self._whole > 0
        share = float((amounts[there] / self._whole[there]).max(initial=0.0))
        self._requested[job.name] = share
        self._sum += share
        self._integral_then[job.name] = self._integral

    def advance(self, passed_s: float) -> None:
        """Time passes."""
        self._integral += passed_s * max(self._sum, 1.0)

    def remove(self, name: str) -> float:
        """A job leaves. Returns the integral since its arrival."""
        self._sum -= self._requested.pop(name)
        return self._integral - self._integral_then.pop(name)
