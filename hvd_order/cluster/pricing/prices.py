"""Exponential prices of resources.

Sources: Bao et al., "Online Job Scheduling in Distributed Machine Learning Clusters" (OASiS),
INFOCOM 2018, section IV: form and limits. Yu et al., "Toward Efficient Online Scheduling for
Distributed Machine Learning Systems" (PD-ORS), IEEE TNSE 9(4), 2022: one family of prices with a
factor of 1/2; reconstructed, its text was not read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hvd_order.base.errors import InvalidUsage
from hvd_order.cluster.model.job import ClusterJob
from hvd_order.cluster.model.machines import Amounts, Machines

__all__ = ["Prices", "limits_for"]

# Urgent jobs are worth next to nothing at the end of the run. Their worth there would make prices
# vanish until a machine is full: less than this share of a job's worth counts as this share.
_LEAST_SHARE = 1e-3


@dataclass(frozen=True)
class Prices:
    """Price of one unit of a resource for one slot: ``low (high / low)^(used / capacity)``.

    Attributes:
        low: of an empty machine: every job that can be of use can pay it.
        high: of a full machine, by resource: no job can pay it.

    Raises:
        InvalidUsage: ``low`` is not positive, or a high price is below it.
    """

    low: float
    high: Amounts

    def __post_init__(self) -> None:
        if not self.low > 0 or (self.high < self.low).any():
            raise InvalidUsage(f"prices from {self.low} to {self.high}; expected more than 0, the "
                               "lower first")  # fmt: skip

    def of(self, used: Amounts, capacity: Amounts) -> Amounts:
        """Prices by machine and resource. A resource that a machine lacks has the high price."""
        share = np.divide(used, capacity, out=np.ones_like(capacity), where=capacity > 0)
        prices: Amounts = self.low * (self.high / self.low) ** np.clip(share, 0.0, 1.0)
        return prices

    @property
    def ratio(self) -> float:
        """Proved ratio of the optimum to the online worth with exact subproblems: 2 max ln U/L."""
        return 2 * max(1.0, float(np.log(self.high / self.low).max()))


def limits_for(
    jobs: Sequence[ClusterJob],
    machines: Machines,
    slot_s: float,
    slots: int,
    factor: float = 0.5,
    workers: bool = True,
    servers: bool = True,
    of: NDArray[np.bool_] | None = None,
) -> Prices:
    """Prices such that no job can pay for a full machine, and each for an empty one.

    high: the largest worth of a fastest run over the smallest demand of the resource. low: the
    smallest worth at the end of the run over all that the job takes, times ``factor / eta``, where
    1/eta is at most the share of the cluster's resource-slots that any job takes.

    Args:
        jobs: such as will arrive.
        of: machines that have these prices, by their places; None: all.
        factor: 1/2 with one family of prices; 1/4 with two, of workers' and of servers' machines.
        workers, servers: whose demands count.
    """
    if not jobs:
        raise InvalidUsage("no example of a job; prices follow from what jobs are worth")
    capacity = machines.capacity if of is None else machines.capacity[of]
    high = np.zeros(len(machines.resources))
    worths: list[float] = []
    needs: list[float] = []
    for job in jobs:
        demands = []
        if workers:
            demands.append(machines.amounts(job.worker))
        if servers and job.workers_per_server is not None:
            demands.append(machines.amounts(job.server))
        most = job.servers_for(job.most)
        fastest = job.speed.samples_per_s(job.most, most, 1, job.batch) * slot_s
        best = job.utility((math.ceil(job.samples / fastest - 1e-9) - 1) * slot_s)
        for demand in demands:
            positive = demand > 0
            high[positive] = np.maximum(high[positive], best / demand[positive])
        one = job.speed.samples_per_s(1, job.servers_for(1), 2, job.batch) * slot_s
        worker_slots = math.ceil(job.samples / one - 1e-9)
        need = worker_slots * float(sum(demand.sum() for demand in demands))
        if need > 0 and best > 0:
            late = job.utility(max((slots - 1) * slot_s - job.arrival_s, 0.0))
            worths.append(max(late, _LEAST_SHARE * best) / need)
            needs.append(need)
    if not worths:
        return Prices(1.0, np.ones_like(high))
    share = min(1.0, min(needs) / (slots * float(capacity.sum())))
    low = factor * share * min(worths)
    return Prices(low, np.maximum(high, low))
