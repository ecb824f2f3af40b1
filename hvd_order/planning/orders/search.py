"""The order of pulls with the shortest step, as far as it can be found in about a second.

TAC decides one transfer after the other and never takes a decision back: on random graphs its step
is 1.03 of the best one in the mean and 1.31 at worst. `search` begins with TAC's order and never
returns a worse one.

On one compute resource that never idles while an op could run, the order of ops does not matter,
only when work is unlocked. If S(k) are the first k transfers, T(S) their time, U(S) the work of all
ops that need no other transfer, and W all work, then the makespan is

    max over k of  T(S(k)) + W - U(S(k-1))

since the k-th transfer ends at T(S(k)) and all work not unlocked before it still has to run; k = 0
stands for W alone. So the best order is the path through the subsets whose largest term is least,
and dynamic programming over the subsets finds it. This is minimising the largest cumulative cost
under precedence, which is NP-hard: larger graphs are improved by moving single transfers, with
`hvd_order.planning.steps.execution` as the judge.

Source:
    Abdel-Wahab, Kameda, "Scheduling to minimize maximum cumulative cost subject to series-parallel
    precedence constraints", Operations Research 26, 1978, for the problem; Held, Karp, "A dynamic
    programming approach to sequencing problems", SIAM 10, 1962, for the search over subsets.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import permutations

from hvd_order.base.link.link_model import LinkModel, transfer_s
from hvd_order.planning.graph.graph import Graph, members
from hvd_order.planning.graph.priorities import Priorities
from hvd_order.planning.orders.tac import tac
from hvd_order.planning.steps.execution import pull_overlap

__all__ = ["exact_order", "pull_step_s", "search"]

_MOST_CLASSES = 14  # sets of transfers; 2^14 subsets take about 0.2 s
_MOST_PERMUTED = 6  # transfers, where several resources compute
_OP_RUNS = 120_000  # ops that the judge may run in all: about 0.7 s


def search(graph: Graph, link: LinkModel) -> Priorities:
    """Orders transfers by search; no two share a priority.

    The step is the shortest of all orders up to 14 transfers on one compute resource, where
    parameters that the same ops need count once, and up to 6 transfers on several. It is never
    longer than TAC's. The result depends on the arguments alone.

    Args:
        link: gives the time of each transfer alone.
    """
    first = [graph.parameter_position[name] for name in tac(graph, link)]
    best = exact_order(graph, link)
    if best is None:
        best = _improved(graph, first, link)
    elif pull_step_s(graph, first, link) <= pull_step_s(graph, best, link):
        best = first  # of equally good orders the one that TAC knows reasons for
    return {graph.parameters[i].name: place for place, i in enumerate(best)}


def exact_order(graph: Graph, link: LinkModel) -> list[int] | None:
    """Positions of parameters in an order with the shortest step; None: too many to search."""
    if len(graph.resources) <= 1:
        classes = _alike(graph)
        return _best_path(graph, classes, link) if len(classes) <= _MOST_CLASSES else None
    if len(graph.parameters) > _MOST_PERMUTED:
        return None
    orders = map(list, permutations(range(len(graph.parameters))))
    return min(orders, key=lambda order: pull_step_s(graph, order, link))


def pull_step_s(graph: Graph, order: Sequence[int], link: LinkModel) -> float:
    """Time from the first pull to the last op, with pulls in this order; 0 for an empty graph."""
    return pull_overlap(graph, order, link).step_s if graph.ops or order else 0.0


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


def _best_path(graph: Graph, classes: list[int], link: LinkModel) -> list[int]:
    count = len(classes)
    subsets = 1 << count
    times = [transfer_s(parameter.size_bytes, link) for parameter in graph.parameters]
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
    least = [work] * subsets  # the largest term of the best path to a subset
    last = [0] * subsets  # its last class
    for subset in range(1, subsets):
        low = subset & -subset
        arrived[subset] = arrived[subset ^ low] + class_s[low.bit_length() - 1]
        least[subset], last[subset] = min(
            (max(least[subset ^ (1 << c)], arrived[subset] + work - unlocked[subset ^ (1 << c)]), c)
            for c in range(count)
            if subset >> c & 1
        )
    path: list[int] = []
    subset = subsets - 1
    while subset:
        path[:0] = members(classes[last[subset]])
        subset ^= 1 << last[subset]
    return path


def _improved(graph: Graph, order: list[int], link: LinkModel) -> list[int]:
    """Moves single transfers while that shortens the step, within `_OP_RUNS`."""
    left = _OP_RUNS // max(len(graph.ops), 1)
    best_s = pull_step_s(graph, order, link)
    floor_s = max(
        math.fsum(transfer_s(parameter.size_bytes, link) for parameter in graph.parameters),
        graph.compute_s / max(len(graph.resources), 1),
    )
    moved = True
    while moved and best_s > floor_s:
        moved = False
        for candidate in _moves(order):
            if left == 0:
                return order
            left -= 1
            step_s = pull_step_s(graph, candidate, link)
            if step_s < best_s * (1 - 1e-9):
                order, best_s, moved = candidate, step_s, True
                break
    return order


def _moves(order: list[int]) -> Iterator[list[int]]:
    """Orders with one transfer at another place, near places first."""
    for distance in range(1, len(order)):
        for place in range(len(order) - distance):
            yield [*order[:place], *order[place + 1 : place + distance + 1], order[place],
                   *order[place + distance + 1 :]]  # fmt: skip
            yield [*order[:place], order[place + distance], *order[place : place + distance],
                   *order[place + distance + 1 :]]  # fmt: skip
