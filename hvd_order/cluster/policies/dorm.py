"""Dorm: utilisation by an integer programme, within bounds on unfairness and on changes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hvd_order.base.errors import InvalidUsage
from hvd_order.cluster.policies.allocation.book import Book
from hvd_order.cluster.policies.allocation.realise import Target, realise
from hvd_order.cluster.policies.drf import fair_targets, in_turn
from hvd_order.cluster.policies.interface import JobState, PolicyDecision, View

__all__ = ["Dorm"]

# Of the objective, which is a sum of parts of the cluster: fair and unchanged among equals.
_CHANGE = 2e-3
_UNFAIRNESS = 1e-3
_BROKEN = 10.0  # of each resource: more than any use of the share is worth
_GAP = 1e-4
_NODES = 200  # ends most long searches at the same place on any machine, unlike the time limit


class Dorm:
    """Keeps as much of the cluster in use as it can. Running jobs do not stop.

    At each arrival and end: numbers of workers, from ``Job.least`` to ``Job.most``, or 0 for jobs
    that wait, such that

    * the sum over resources of the part in use is largest,
    * dominant shares differ from those of dominant resource fairness by at most
      ``fairness_loss`` times the sum of those,
    * of the jobs that run, at most ``ceil(adjustments * jobs)`` change.

    Where the second and third cannot both be kept, the second is broken by as little as can be.

    Source: Sun et al., "Towards Distributed Machine Learning in Shared Clusters: A
    Dynamically-Partitioned Approach", SMARTCOMP 2017, by the sentence on it in Bao et al., INFOCOM
    2018. Reconstructed, not read: the form of both bounds and their default values, and what is
    done when both cannot be kept. The programme counts resources of the whole cluster, not of each
    machine, so that it stays small; ``realise`` then gives what fits.

    Args:
        fairness_loss, adjustments: bounds, of 0 to 1.
        time_limit_s: of the search; the best that was found counts. With hundreds of jobs some
            searches reach it, and a run then depends on the machine that it is worked out on;
            infinity: none.

    Raises:
        InvalidUsage: a bound is not from 0 to 1, or the limit not positive.
    """

    def __init__(
        self, fairness_loss: float = 0.2, adjustments: float = 0.2, time_limit_s: float = 0.5
    ) -> None:
        if not (0 <= fairness_loss <= 1 and 0 <= adjustments <= 1 and time_limit_s > 0):
            raise InvalidUsage(
                f"a fairness loss of {fairness_loss}, adjustments of {adjustments} and a limit of "
                f"{time_limit_s} s; expected two parts from 0 to 1 and a time of more than 0"
            )
        self._fairness_loss = fairness_loss
        self._adjustments = adjustments
        self._time_limit_s = time_limit_s
        self._book = Book(elastic=True)
        self._unchanged: frozenset[int] = frozenset()  # the jobs when nothing was left to change

    def decide(self, view: View) -> PolicyDecision:
        """Solves the programme, unless it left the same jobs as they are before."""
        decision = PolicyDecision()
        jobs = self._book.jobs(view, decision)
        numbers = frozenset(state.number for state in jobs)
        if not jobs or numbers == self._unchanged:
            return decision
        fair = fair_targets(self._book, jobs, view.machines.capacity)
        targets = self._solve(view, jobs, fair)
        if targets is not None:
            decision.place = realise(view, in_turn(jobs, targets))
        if not view.running and not decision.place:
            # Out of time, or the jobs use nothing that counts.
            decision.place = realise(view, in_turn(jobs, fair))
        self._unchanged = frozenset() if decision.place else numbers
        return decision

    def _solve(
        self, view: View, jobs: Sequence[JobState], fair: Mapping[str, Target]
    ) -> dict[str, Target] | None:
        whole = view.machines.capacity.sum(axis=0)
        counted = np.flatnonzero(whole > 0)
        rows = _IntegerProgramme()
        used: dict[int, dict[int, float]] = {int(r): {} for r in counted}
        changes: dict[int, float] = {}
        losses: dict[int, float] = {}
        fair_sum = 0.0
        columns: list[tuple[int, int | None]] = []
        for state in jobs:
            job, most = state.job, self._book.workers(state)
            runs = state.placement is not None
            n = rows.column(job.least if runs else 0, most)
            # Servers are as many as the workers need, rounded up.
            s = None
            if job.workers_per_server is not None:
                per = job.workers_per_server
                s = rows.column(0, job.servers_for(most))
                rows.add({s: per, n: -1.0}, 0, per - 1)
            columns.append((n, s))
            parts: list[dict[int, float]] = []
            for r in counted:
                part = {n: float(state.worker[r] / whole[r])}
                if s is not None:
                    part[s] = float(state.server[r] / whole[r])
                used[int(r)].update(part)
                parts.append(part)
            if state.placement is None:
                z = rows.column(0, 1)
                rows.add({n: 1.0, z: -float(most)}, -math.inf, 0)
                rows.add({n: 1.0, z: -float(job.least)}, 0, math.inf)
            else:
                now = state.placement.workers
                r_changed = rows.column(0, 1, -_CHANGE)
                rows.add({n: 1.0, r_changed: -float(most)}, -math.inf, now)
                rows.add({n: 1.0, r_changed: float(most)}, now, math.inf)
                changes[r_changed] = 1.0
            # Loss of fairness: |share - fair share|, both by the resource that dominates.
            fairly = fair[job.name]
            share = self._book.share(state, *fairly)
            fair_sum += share
            w, servers = fairly if fairly.workers else (job.least, job.servers_for(job.least))
            amounts = (w * state.worker + servers * state.server)[counted] / whole[counted]
            dominant = parts[int(amounts.argmax())] if len(counted) else {}
            loss = rows.column(0, math.inf, -_UNFAIRNESS, integer=False)
            rows.add({loss: 1.0, **dominant}, share, math.inf)
            rows.add({loss: 1.0, **{c: -v for c, v in dominant.items()}}, -share, math.inf)
            losses[loss] = 1.0
        for part in used.values():
            rows.add(part, 0, 1 + 1e-9)
            rows.gain(part)
        broken = rows.column(0, math.inf, -_BROKEN * len(counted), integer=False)
        rows.add({**losses, broken: -1.0}, -math.inf, self._fairness_loss * fair_sum)
        if changes:
            rows.add(changes, 0, math.ceil(self._adjustments * len(changes) - 1e-9))
        found = rows.solve(self._time_limit_s)
        if found is None:
            return None
        targets = {}
        for state, (n, _) in zip(jobs, columns, strict=True):
            workers = round(found[n])
            targets[state.job.name] = Target(workers, state.job.servers_for(workers))
        return targets


@dataclass
class _IntegerProgramme:
    """An integer programme that grows column by column and row by row."""

    _least: list[float] = field(default_factory=list)
    _most: list[float] = field(default_factory=list)
    _integer: list[int] = field(default_factory=list)
    _gain: list[float] = field(default_factory=list)
    _entries: list[tuple[int, int, float]] = field(default_factory=list)
    _low: list[float] = field(default_factory=list)
    _high: list[float] = field(default_factory=list)

    def column(self, least: float, most: float, gain: float = 0.0, *, integer: bool = True) -> int:
        self._least.append(least)
        self._most.append(most)
        self._gain.append(gain)
        self._integer.append(int(integer))
        return len(self._gain) - 1

    def add(self, row: Mapping[int, float], low: float, high: float) -> None:
        self._entries += [(len(self._low), column, value) for column, value in row.items()]
        self._low.append(low)
        self._high.append(high)

    def gain(self, row: Mapping[int, float]) -> None:
        for column, value in row.items():
            self._gain[column] += value

    def solve(self, time_limit_s: float) -> list[float] | None:
        """The best columns that were found; None if there are none."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        row, column, value = zip(*self._entries, strict=True)
        matrix = csr_array((value, (row, column)), shape=(len(self._low), len(self._gain)))
        result = milp(
            -np.array(self._gain),
            integrality=np.array(self._integer),
            bounds=Bounds(self._least, self._most),
            constraints=LinearConstraint(matrix, self._low, self._high),
            options={"time_limit": time_limit_s, "node_limit": _NODES, "mip_rel_gap": _GAP},
        )
        return None if result.x is None else [float(x) for x in result.x]
