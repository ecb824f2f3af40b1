"""The largest total utility that anybody could reach who knew all jobs: for small instances.

One integer programme over jobs, slots and machines, in the quantised work of the online policies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hvd_order.base.errors import InvalidUsage
from hvd_order.cluster.model.job import ClusterJob
from hvd_order.cluster.model.machines import Machines
from hvd_order.cluster.pricing.schedule import workers_needed

__all__ = ["offline_optimum"]


def offline_optimum(
    jobs: Sequence[ClusterJob],
    machines: Machines,
    slots: int,
    quanta: int | Sequence[int],
    slot_s: float = 1.0,
    limit_s: float = 60.0,
) -> float:
    """Total utility of the best choice of jobs and schedules.

    Args:
        quanta: equal parts of a job's work, of all jobs or of each.
        limit_s: time for the solver.

    Raises:
        InvalidUsage: the solver did not prove an optimum in time.
    """
    parts = [quanta] * len(jobs) if isinstance(quanta, int) else list(quanta)
    model = _Model()
    capacity: dict[tuple[int, int, int], dict[int, float]] = {}
    for job, amount in zip(jobs, parts, strict=True):
        _add_job(model, capacity, job, amount, machines, slots, slot_s)
    for (_, machine, resource), row in capacity.items():
        model.constrain(row, -math.inf, float(machines.capacity[machine, resource]))
    return model.maximum(limit_s)


def _add_job(
    model: _Model,
    capacity: dict[tuple[int, int, int], dict[int, float]],
    job: ClusterJob,
    quanta: int,
    machines: Machines,
    slots: int,
    slot_s: float,
) -> None:
    """Adds a job: in each slot one amount of work on one machine, or one on several, or none."""
    worker, server = machines.amounts(job.worker), machines.amounts(job.server)
    needed = workers_needed(job, job.samples, quanta, slot_s)
    first = math.ceil(job.arrival_s / slot_s - 1e-9)

    def take(slot: int, machine: int, variable: int, amounts: np.ndarray) -> None:
        for resource in np.flatnonzero(amounts):
            row = capacity.setdefault((slot, machine, int(resource)), {})
            row[variable] = row.get(variable, 0.0) + float(amounts[resource])

    work: dict[int, float] = {}  # of the whole job
    ends = {}
    for slot in range(first, slots):
        ends[slot] = model.binary(job.utility((slot - first) * slot_s))
    if not ends:
        return
    model.constrain(dict.fromkeys(ends.values(), 1.0), 0.0, 1.0)
    for slot in range(first, slots):
        chosen: dict[int, float] = {}
        for amount in range(1, quanta + 1):
            inside, outside = needed[True][amount], needed[False][amount]
            if inside is not None:
                usage = inside * worker + job.servers_for(inside) * server
                for machine in range(len(machines)):
                    if (usage <= machines.capacity[machine] + 1e-9).all():
                        one = model.binary(0.0)
                        chosen[one] = 1.0
                        work[one] = float(amount)
                        take(slot, machine, one, usage)
            if outside is not None:
                several = model.binary(0.0)
                chosen[several] = 1.0
                work[several] = float(amount)
                for count, demand in ((outside, worker), (job.servers_for(outside), server)):
                    placed = {several: -float(count)}
                    for machine in range(len(machines)):
                        here = model.integer(float(count))
                        placed[here] = 1.0
                        take(slot, machine, here, demand)
                    model.constrain(placed, 0.0, math.inf)
        model.constrain(chosen, 0.0, 1.0)
        # No work behind the end.
        row = dict.fromkeys(chosen, 1.0)
        for end in range(slot, slots):
            row[ends[end]] = -1.0
        model.constrain(row, -math.inf, 0.0)
    model.constrain({**work, **dict.fromkeys(ends.values(), -float(quanta))}, 0.0, math.inf)


class _Model:
    """Variables and rows of an integer programme."""

    def __init__(self) -> None:
        self._worth: list[float] = []
        self._most: list[float] = []
        self._rows: list[dict[int, float]] = []
        self._low: list[float] = []
        self._high: list[float] = []

    def binary(self, worth: float) -> int:
        self._worth.append(worth)
        self._most.append(1.0)
        return len(self._worth) - 1

    def integer(self, most: float) -> int:
        self._worth.append(0.0)
        self._most.append(most)
        return len(self._worth) - 1

    def constrain(self, row: dict[int, float], low: float, high: float) -> None:
        if row:
            self._rows.append(dict(row))
            self._low.append(low)
            self._high.append(high)

    def maximum(self, limit_s: float) -> float:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        if not self._worth:
            return 0.0
        places = [(i, column) for i, row in enumerate(self._rows) for column in row]
        values = [value for row in self._rows for value in row.values()]
        shape = (len(self._rows), len(self._worth))
        matrix = csr_array((values, tuple(np.array(places).T)), shape=shape)
        found = milp(
            -np.array(self._worth),
            constraints=LinearConstraint(matrix, self._low, self._high),
            bounds=Bounds(0, self._most),
            integrality=np.ones(shape[1]),
            options={"time_limit": limit_s, "mip_rel_gap": 0.0},
        )
        if found.status != 0:
            raise InvalidUsage(
                f"no proved optimum of {shape[1]} unknowns in {limit_s} s ({found.message}); take "
                "fewer jobs, slots or machines"
            )
        return float(-found.fun)
