"""Lower bound on a step that pulls its parameters over one channel.

Where an order with the shortest step can be found (`hvd_order.planning.orders.search`), its step is
the bound. Moving several parameters at a time gains nothing, because each would arrive later.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from hvd_order.base.link.link_model import LinkModel, transfer_s
from hvd_order.planning.graph.graph import Graph, members
from hvd_order.planning.orders.search import exact_order, pull_step_s

__all__ = ["PullBound", "pull_bound"]


@dataclass(frozen=True)
class PullBound:
    """A lower bound on the makespan of any order.

    Attributes:
        makespan_s: time from the first pull to the last op.
        exact: whether some order attains the bound.
    """

    makespan_s: float
    exact: bool


def pull_bound(graph: Graph, link: LinkModel) -> PullBound:
    """Returns the shortest makespan, or a lower bound where a search would take too long.

    The result is exact up to 14 transfers on one compute resource, where parameters that the same
    ops need count once. Otherwise it is the largest of two kinds of terms. First, for each set of
    parameters that some op needs: all of its transfers, then all work that needs all of them.
    Second, for the best last transfer: all transfers, then the work that needs the last one. The
    first kind is exact where sets are nested, as in chains.
    """
    times = [transfer_s(parameter.size_bytes, link) for parameter in graph.parameters]
    if len(graph.resources) <= 1:
        best = exact_order(graph, link)
        if best is not None:
            return PullBound(pull_step_s(graph, best, link), exact=True)
    return PullBound(_relaxed(graph, times), exact=False)


def _relaxed(graph: Graph, times: list[float]) -> float:
    work: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for op, mask in zip(graph.ops, graph.needs, strict=True):
        of_set = work[mask]
        of_set[op.resource] = of_set.get(op.resource, 0.0) + op.duration_s

    def work_that_needs(mask: int) -> float:
        total: dict[str, float] = {}
        for needs, by_resource in work.items():
            if needs & mask == mask:
                for resource, seconds in by_resource.items():
                    total[resource] = total.get(resource, 0.0) + seconds
        return max(total.values(), default=0.0)

    bounds = [work_that_needs(0)]
    bounds += [math.fsum(times[i] for i in members(mask)) + work_that_needs(mask) for mask in work]
    if times:
        last_s = min(work_that_needs(1 << i) for i in range(len(times)))
        bounds.append(math.fsum(times) + last_s)
    return max(bounds)
