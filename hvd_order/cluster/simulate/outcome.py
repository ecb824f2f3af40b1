"""What became of a job, and of all jobs of a run."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field

import numpy as np

__all__ = ["JOB_COLUMNS", "JobOutcome", "PlacementInterval", "Summary"]

JOB_COLUMNS = ("job", "model", "arrival_s", "started_s", "ended_s", "completion_s", "rejected",
               "utility", "worker_s", "changes", "fairness")  # fmt: skip
"""Columns of ``JobOutcome.row``."""


@dataclass(frozen=True)
class PlacementInterval:
    """A time in which a job had one placement."""

    begin_s: float
    end_s: float
    parts: tuple[tuple[int, int, int], ...]  # machine, workers, servers


@dataclass(frozen=True)
class JobOutcome:
    """What became of a job.

    Attributes:
        ended_s: None: it was rejected, or the run was over before its end.
        rejected: whether the policy refused it.
        utility: what its completion was worth; 0 without one.
        worker_s: workers by seconds that it had.
        changes: how often its placement was changed or taken.
        fairness: finish-time fairness: its time from arrival to end over the time that it would
            have taken with its share of the cluster; None without an end.
        placements: where the run keeps them.
    """

    name: str
    model: str
    arrival_s: float
    started_s: float | None
    ended_s: float | None
    rejected: bool
    utility: float
    worker_s: float
    changes: int
    fairness: float | None
    placements: tuple[PlacementInterval, ...] = ()

    def row(self) -> tuple[str | float | None, ...]:
        """As a row of a table, with the columns ``JOB_COLUMNS``."""
        return (
            self.name, self.model, self.arrival_s, self.started_s, self.ended_s, self.completion_s,
            int(self.rejected), self.utility, self.worker_s, self.changes, self.fairness,
        )  # fmt: skip

    @property
    def completion_s(self) -> float | None:
        """Time from arrival to end."""
        return None if self.ended_s is None else self.ended_s - self.arrival_s

    @property
    def wait_s(self) -> float | None:
        """Time from arrival to the first start."""
        return None if self.started_s is None else self.started_s - self.arrival_s


_UNFAIR = 1.1  # Zheng et al., "Shockwave", NSDI 2023


@dataclass
class Summary:
    """All jobs of a run. Holds a few numbers a job.

    Attributes:
        jobs, completed, rejected: how many.
        utility: sum.
        changes: sum of changed and taken placements.
        first_s, last_s: first arrival and last end.
        used: integral of each resource in use, in amount by seconds.
        capacity: of each resource.
        decisions, decision_s, longest_decision_s: calls of the policy, and processor time that they
            took, in all and at most.
    """

    jobs: int = 0
    completed: int = 0
    rejected: int = 0
    utility: float = 0.0
    changes: int = 0
    first_s: float = math.inf
    last_s: float = 0.0
    used: dict[str, float] = field(default_factory=dict)
    capacity: dict[str, float] = field(default_factory=dict)
    decisions: int = 0
    decision_s: float = 0.0
    longest_decision_s: float = 0.0
    _completion_s: array[float] = field(default_factory=lambda: array("d"), repr=False)
    _wait_s: array[float] = field(default_factory=lambda: array("d"), repr=False)
    _fairness: array[float] = field(default_factory=lambda: array("d"), repr=False)

    def add(self, outcome: JobOutcome) -> None:
        """Counts a job."""
        self.jobs += 1
        self.rejected += outcome.rejected
        self.utility += outcome.utility
        self.changes += outcome.changes
        self.first_s = min(self.first_s, outcome.arrival_s)
        if outcome.wait_s is not None:
            self._wait_s.append(outcome.wait_s)
        if outcome.completion_s is not None and outcome.ended_s is not None:
            self.completed += 1
            self.last_s = max(self.last_s, outcome.ended_s)
            self._completion_s.append(outcome.completion_s)
        if outcome.fairness is not None:
            self._fairness.append(outcome.fairness)

    @property
    def makespan_s(self) -> float:
        """From the first arrival to the last end; 0 if no job ended."""
        return max(self.last_s - self.first_s, 0.0) if self.completed else 0.0

    def metrics(self) -> dict[str, float]:
        """All figures by name; nan where no job ended."""

        def of(values: array[float], quantile: float | None) -> float:
            if not values:
                return math.nan
            if quantile is None:
                return float(np.mean(values))
            return float(np.quantile(values, quantile))

        found = {
            "jobs": float(self.jobs),
            "completed": float(self.completed),
            "rejected": float(self.rejected),
            "utility": self.utility,
            "completion_mean_s": of(self._completion_s, None),
            "completion_p50_s": of(self._completion_s, 0.5),
            "completion_p95_s": of(self._completion_s, 0.95),
            "completion_p99_s": of(self._completion_s, 0.99),
            "wait_mean_s": of(self._wait_s, None),
            "makespan_s": self.makespan_s,
            "fairness_worst": max(self._fairness, default=math.nan),
            "unfair_share": (
                sum(f > _UNFAIR for f in self._fairness) / len(self._fairness)
                if self._fairness else math.nan
            ),
            "changes": float(self.changes),
            "decision_mean_s": self.decision_s / max(self.decisions, 1),
            "decision_longest_s": self.longest_decision_s,
        }  # fmt: skip
        for resource, amount in self.used.items():
            available = self.capacity[resource] * self.makespan_s
            found[f"utilisation_{resource}"] = (
                float(amount / available) if available > 0 else math.nan
            )
        return found
