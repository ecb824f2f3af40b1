"""Lower bound on a step that pulls its parameters over one channel.

With one compute resource that never idles while an op could run, the order of ops does not matter.
Only the time at which work is unlocked does. If S(k) are the first k transfers, T(S) their time,
U(S) the work of all ops that need no other transfer, and W all work, then the makespan is

    max over k of  T(S(k)) + W - U(S(k-1))

since the k-th transfer ends at T(S(k)) and all work not unlocked before it still has to run. k
starts at 0, where the term is W alone. Moving several parameters at a time gains nothing, because
each would arrive later. So the best order is the path through the subsets whose largest term is
least. This is minimising the largest cumulative cost under precedence, which is NP-hard.

Source:
    Abdel-Wahab, Kameda, "Scheduling to minimize maximum cumulative cost subject to series-parallel
    precedence constraints", Operations Research 26, 1978, for the problem.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from hvd_order.plan.graph.graph import Graph, members
from hvd_order.plan.link.link_model import LinkModel
from hvd_order.plan.steps.delivery import transfer_s

__all__ = ["PullBound", "pull_bound"]

_MOST_SEARCHED = 14  # transfers; 2^14 subsets take about 0.2 s


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
        classes = _alike(graph)
        if len(classes) <= _MOST_SEARCHED:
            return PullBound(_search(graph, classes, times), exact=True)
    return PullBound(_relaxed(graph, times), exact=False)


def _alike(graph: Graph) -> list[int]:
    """Sets of parameters that the same ops need; they unlock work only when all have arrived."""
    needed_by: defaultdict[int, int] = defaultdict(int)
    for k, mask in enumerate(dict.fromkeys(graph.needs)):
        for i in members(mask):
            needed_by[i] |= 1 << k  # the k-th of the different sets that ops need
    classes: defaultdict[int, int] = defaultdict(int)
    for i in range(len(graph.parameters)):
        classes[needed_by[i]] |= 1 << i
    return list(classes.values())


def _search(graph: Graph, classes: list[int], times: list[float]) -> float:
    count = len(classes)
    subsets = 1 << count
    class_s = [math.fsum(times[i] for i in members(mask)) for mask in classes]
    unlocked = [0.0] * subsets
    for op, needs in zip(graph.ops, graph.needs, strict=True):
        subset = sum(1 << c for c in range(count) if classes[c] & needs)
        unlocked[subset] += op.duration_s
    for c in range(count):  # adds to each subset what its subsets unlock
        for subset in range(subsets):
            if subset >> c & 1:
                unlocked[subset] += unlocked[subset ^ (1 << c)]
    work = graph.compute_s
    arrived = [0.0] * subsets
    least = [work] * subsets
    for subset in range(1, subsets):
        low = subset & -subset
        arrived[subset] = arrived[subset ^ low] + class_s[low.bit_length() - 1]
        least[subset] = min(
            max(least[subset ^ (1 << c)], arrived[subset] + work - unlocked[subset ^ (1 << c)])
            for c in range(count)
            if subset >> c & 1
        )
    return least[-1]


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
