"""The schedule of a job with the largest payoff at given prices: a dynamic programme over slots.

Sources: Bao et al. (OASiS), INFOCOM 2018, algorithm 2; Yu et al. (PD-ORS), IEEE TNSE 9(4), 2022, as
reconstructed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hvd_order.cluster.model.job import ClusterJob
from hvd_order.cluster.model.placement import JobPlacement

__all__ = ["JobSchedule", "Offer", "best_schedule", "cheapest", "workers_needed"]

Offer = tuple[float, JobPlacement | None]
"""Cost of an amount of work in a slot, and the placement; (inf, None): impossible."""


@dataclass(frozen=True)
class JobSchedule:
    """Placements of a job by slot.

    Attributes:
        last: slot in which it ends.
        cost: at the prices when it was made.
        payoff: utility minus cost.
    """

    placements: dict[int, JobPlacement]
    last: int
    cost: float
    payoff: float


def workers_needed(
    job: ClusterJob, samples: float, quanta: int, productive_s: float
) -> dict[bool, list[int | None]]:
    """Fewest workers that train 0 to all quanta in a slot, together on a machine or apart.

    Args:
        samples: of all quanta.
        productive_s: time of a slot in which the job trains.

    Returns:
        By ``together``; None where even ``job.most`` workers are too few.
    """
    found: dict[bool, list[int | None]] = {}
    for together in (True, False):
        # By number of workers: what at most so many train. More workers may be slower.
        reached = np.array(
            [
                job.speed.samples_per_s(w, job.servers_for(w), 1 if together else 2, job.batch)
                for w in range(job.least, job.most + 1)
            ]
        )
        reached = np.maximum.accumulate(reached) * productive_s * (1 + 1e-9)
        goals = samples * np.arange(quanta + 1) / quanta
        places = np.searchsorted(reached, goals)
        counts = [int(p) + job.least if p < len(reached) else None for p in places[1:]]
        found[together] = [0, *counts]
    return found


def cheapest(costs: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Least costs of an amount of work from the first slot to each slot.

    Args:
        costs: of 0, 1, ... quanta in each slot, a row for each slot; the first column is 0.

    Returns:
        The same for all slots up to each, and what of it each slot takes.
    """
    slots, count = costs.shape
    best = np.full((slots, count), math.inf)
    taken = np.zeros((slots, count), dtype=np.int64)
    before = np.full(count, math.inf)
    before[0] = 0.0
    amount = np.arange(count)
    left = amount[:, None] - amount[None, :]  # of each sum: by sum and by what the slot takes
    for slot in range(slots):
        ways = np.where(left >= 0, costs[slot][None, :] + before[np.maximum(left, 0)], math.inf)
        taken[slot] = ways.argmin(axis=1)
        best[slot] = ways[amount, taken[slot]]
        before = best[slot]
    return best, taken


def best_schedule(
    worth: Callable[[int], float],
    slots: range,
    quanta: int,
    offers: Callable[[int], list[Offer]],
) -> JobSchedule | None:
    """The schedule with the largest payoff, of equal ones the earliest to end.

    Args:
        worth: utility of an end in a slot.
        slots: that may be used.
        offers: by slot: costs and placements of 0 to ``quanta`` quanta.

    Returns:
        None if the work fits in no way. The payoff may be negative.
    """
    if not len(slots):
        return None
    offered = [offers(slot) for slot in slots]
    costs = np.array([[cost for cost, _ in row] for row in offered])
    best, taken = cheapest(costs)
    payoffs = np.array([worth(slot) for slot in slots]) - best[:, quanta]
    # A sum of floats may differ in its last bits: then the earlier end counts as equal.
    most = float(payoffs.max())
    if not math.isfinite(most):
        return None
    at = int(np.argmax(payoffs >= most - 1e-12 * abs(most)))
    placements: dict[int, JobPlacement] = {}
    left = quanta
    for place in range(at, -1, -1):
        amount = int(taken[place, left])
        placement = offered[place][amount][1]
        if placement is not None:
            placements[slots[place]] = placement
        left -= amount
    return JobSchedule(placements, slots[at], float(best[at, quanta]), float(payoffs[at]))
