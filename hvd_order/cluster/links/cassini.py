"""CASSINI: jobs begin their iterations so that their transfers do not meet.

Source: Rajasekaran et al., "CASSINI", NSDI 2024, as public descriptions and a reimplementation tell
it (not read): affinity graph, walk, time shifts. Reconstructed: links with the same jobs count as
one, and how jobs keep to their shifts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hvd_order.base.errors import InvalidUsage
from hvd_order.cluster.links.circle import Demand, best_rotations
from hvd_order.cluster.links.jobs import LinkJob, LinkSharing
from hvd_order.cluster.links.shared import alone_s, simulate_shared

__all__ = ["Shifts", "demand_of", "shifts_of", "time_shifts"]

_WARM = 4  # iterations before a paced job repeats itself


@dataclass(frozen=True)
class Shifts:
    """Places of jobs in time.

    Attributes:
        shift_s: of each job, within its iteration.
        every_s: iteration of each job, a whole number of intervals.
        score: the worst one of a link; 1: no transfers meet.
    """

    shift_s: Sequence[float]
    every_s: Sequence[float]
    score: float

    def sharing(self) -> LinkSharing:
        """Jobs begin at their shifts and keep to their iterations, unless they are late."""
        return LinkSharing([0] * len(self.shift_s), self.shift_s, self.every_s)


def demand_of(job: LinkJob, capacity: Sequence[float], interval_s: float) -> Demand:
    """What the job asks of its narrowest link, by interval of an iteration, when it is alone.

    The iteration is rounded up to whole intervals, and the job is simulated at that pace.
    """
    per_byte = max(load / capacity[link] for link, load in job.load.items())
    count = max(math.ceil(alone_s(job.step, per_byte) / interval_s - 1e-9), 1)
    every_s = count * interval_s
    alone = LinkJob(job.name, job.step, {0: per_byte})
    until_s = (_WARM + 1) * every_s
    trace = simulate_shared([alone], [1.0], until_s, LinkSharing([0], [0.0], [every_s]))[0]
    edges = np.linspace(_WARM * every_s, until_s, count + 1)
    found = np.zeros(count)
    for begin_s, end_s, rate in trace.sent:
        inside = np.minimum(end_s, edges[1:]) - np.maximum(begin_s, edges[:-1])
        found += np.maximum(inside, 0.0) * rate * per_byte
    return np.minimum(found / interval_s, 1.0)


def shifts_of(
    jobs: Sequence[LinkJob], capacity: Sequence[float], interval_s: float
) -> Shifts | None:
    """Shifts of jobs on their machines.

    Args:
        interval_s: resolution of the circle; iterations are rounded up to multiples of it.

    Returns:
        None: the affinity graph has a loop, so CASSINI does not take such a placement.

    Raises:
        InvalidUsage: a circle is too long; a longer interval makes it shorter.
    """
    if not 0 < interval_s < math.inf:
        raise InvalidUsage(f"intervals of {interval_s} s; expected more than 0")
    demands = [demand_of(job, capacity, interval_s) if job.load else np.zeros(1) for job in jobs]
    # Of links with the same jobs, the narrowest stands for all of them.
    by_jobs: dict[tuple[int, ...], dict[int, Demand]] = {}
    for link in range(len(capacity)):
        here = {i: demands[i] * _part(job, link, capacity) for i, job in enumerate(jobs)
                if link in job.load}  # fmt: skip
        known = by_jobs.get(tuple(here))
        if len(here) > 1 and (known is None or _sum(here) > _sum(known)):
            by_jobs[tuple(here)] = here
    found = time_shifts([len(demand) for demand in demands], list(by_jobs.values()))
    if found is None:
        return None
    shifts, worst = found
    return Shifts(
        [shift * interval_s for shift in shifts],
        [len(demand) * interval_s if job.load else 0.0
         for job, demand in zip(jobs, demands, strict=True)],
        worst,
    )  # fmt: skip


def time_shifts(
    iterations: Sequence[int], links: Sequence[Mapping[int, Demand]]
) -> tuple[list[int], float] | None:
    """One shift for each job, in intervals, from the best rotations on each link.

    Walks the affinity graph of jobs and links breadth first: the job it begins with keeps its
    place, and from job j over link l to job k it is t_k = (t_j - t_jl + t_kl) mod iteration_k.

    Args:
        iterations: of each job, in intervals.
        links: demands by job; links with one job do not matter.

    Returns:
        Shifts and the worst score; None: two jobs are joined in two ways.
    """
    worst = 1.0
    over: dict[int, list[int]] = {}
    for link, demands in enumerate(links):
        for job in demands:
            over.setdefault(job, []).append(link)
    shifts: dict[int, int] = {}
    walked = set()
    for first in range(len(iterations)):
        if first in shifts:
            continue
        shifts[first] = 0
        to_go = deque([first])
        while to_go:
            job = to_go.popleft()
            for link in over.get(job, []):
                if link in walked:
                    continue
                walked.add(link)
                others = links[link].keys() - {job}
                if others & shifts.keys():
                    return None
                score, turns = best_rotations(list(links[link].values()))
                worst = min(worst, score)
                turn = dict(zip(links[link], turns, strict=True))
                for other in sorted(others):
                    shifts[other] = (shifts[job] - turn[job] + turn[other]) % iterations[other]
                    to_go.append(other)
    return [shifts[job] for job in range(len(iterations))], worst


def _part(job: LinkJob, link: int, capacity: Sequence[float]) -> float:
    """Demand on a link over that on the job's narrowest."""
    narrowest = max(load / capacity[each] for each, load in job.load.items())
    return job.load[link] / capacity[link] / narrowest


def _sum(demands: Mapping[int, Demand]) -> float:
    return sum(float(demand.mean()) for demand in demands.values())
