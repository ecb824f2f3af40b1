"""Crux: priorities between jobs, by how much computation their traffic keeps going.

Source: Cao et al., "Crux: GPU-Efficient Communication Scheduling for Deep Learning Training",
SIGCOMM 2024, sections 3.2, 4.2 and 4.3. Its choice of paths (4.1) has no subject here: a machine
has one link, and a switch without limits joins them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache

from hvd_order.cluster.links.jobs import LinkJob, LinkSharing
from hvd_order.cluster.links.levels import compress
from hvd_order.cluster.links.shared import simulate_shared
from hvd_order.cluster.links.step import LinkStep

__all__ = ["correction", "crux_levels", "crux_priorities", "intensity"]

_ITERATIONS = 16
_LEAST = 1e-3  # differences of a smaller part of the link's time are none
_MOST = 100.0


def intensity(job: LinkJob, capacity: Sequence[float]) -> float:
    """GPU intensity W / t: computation of an iteration over time on the narrowest link.

    Computation is counted in workers by seconds: the same as in operations where all workers have
    the same device. A job without traffic has an infinite one.
    """
    link_s = job.link_s(capacity)
    return job.workers * job.step.compute_s / link_s if link_s > 0 else float("inf")


@lru_cache(maxsize=4096)
def correction(
    step: LinkStep, link_s: float, reference: LinkStep, reference_link_s: float
) -> float:
    """Correction factor k of a job against the reference job.

    Both share one link, once under each priority: k is the time on the link that the job gains by
    going first over the time that the reference then loses.

    The paper counts over a window that it does not define. Here it is the steady state, so what
    the start alone decides does not count (reconstructed). Without any gain and loss k is 1;
    otherwise it stays between 1/100 and 100 (reconstructed).

    Args:
        link_s, reference_link_s: time for which an iteration alone occupies the link.
    """
    if step == reference and link_s == reference_link_s:
        return 1.0
    pair = [
        LinkJob("job", step, {0: link_s / step.size_bytes}),
        LinkJob("reference", reference, {0: reference_link_s / reference.size_bytes}),
    ]
    until_s = _ITERATIONS * (step.compute_s + link_s + reference.compute_s + reference_link_s)
    parts = []
    for levels in ([0, 1], [1, 0]):
        traces = simulate_shared(pair, [1.0], until_s, LinkSharing(levels, [0.0] * 2, [0.0] * 2))
        parts.append([
            busy_s / trace.iteration_s
            for trace, busy_s in zip(traces, (link_s, reference_link_s), strict=True)
        ])  # fmt: skip
    gain, loss = parts[0][0] - parts[1][0], parts[1][1] - parts[0][1]
    if gain < _LEAST and loss < _LEAST:
        return 1.0
    return min(max(max(gain, 0.0) / max(loss, _LEAST), 1 / _MOST), _MOST)


def crux_priorities(jobs: Sequence[LinkJob], capacity: Sequence[float]) -> list[float]:
    """P = k I of each job; the largest goes first. The reference job has the most traffic."""
    found = [intensity(job, capacity) for job in jobs]
    traffic = [job.step.size_bytes * sum(job.load.values()) for job in jobs]
    if not any(traffic):
        return found
    reference = jobs[max(range(len(jobs)), key=traffic.__getitem__)]
    factors = [
        correction(job.step, job.link_s(capacity), reference.step, reference.link_s(capacity))
        if amount > 0 else 1.0
        for job, amount in zip(jobs, traffic, strict=True)
    ]  # fmt: skip
    return [k * value for k, value in zip(factors, found, strict=True)]


def crux_levels(
    jobs: Sequence[LinkJob], capacity: Sequence[float], levels: int = 8, seed: int = 0
) -> list[int]:
    """Hardware level of each job, 0 first: priorities compressed to ``levels``."""
    priorities = crux_priorities(jobs, capacity)
    order = sorted(range(len(jobs)), key=lambda i: (-priorities[i], i))
    edges: dict[tuple[int, int], float] = {}
    for place, high in enumerate(order):
        for low in order[place + 1 :]:
            if jobs[high].load.keys() & jobs[low].load.keys():
                edges[high, low] = intensity(jobs[high], capacity)
    return compress(len(jobs), edges, levels, random.Random(seed))
