"""Bounds on a step with all-reduce: exact in program order, a lower bound in any order.

The model's link moves bytes at its rate, interrupts at no cost and has no latency; a real link is
slower. The next step reads a parameter only after this step's gradient has arrived.
docs/theory.md has the proofs and says how tight the bound is.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress

from hvd_order.base.link.link_model import LinkModel
from hvd_order.planning.graph.graph import Graph, bits
from hvd_order.planning.graph.synthetic import chain
from hvd_order.planning.orders.due_date import due_date
from hvd_order.planning.steps.delivery import LinkQueue
from hvd_order.planning.steps.program import play_steps, steady_step_s

__all__ = ["chain_optimum_s", "program_optimum_s", "step_bound_s"]

_IDLE = LinkModel(0.0, 0.0, 0.0)


def program_optimum_s(graph: Graph, link: LinkModel) -> float:
    """Shortest step time of any order of transfers while ops run in program order. Attainable.

    Raises:
        InvalidUsage: the graph has several resources.

    Source:
        Horn, "Some simple scheduling algorithms", Naval Research Logistics 21, 1974, and
        docs/theory.md for steps that follow each other.
    """
    return steady_step_s(graph, due_date(graph, link), link)


def chain_optimum_s(
    forward_s: Sequence[float], backward_s: Sequence[float], wire_s: Sequence[float]
) -> float:
    """:func:`program_optimum_s` of a chain of layers.

    One device computes forward 0, 1, ..., n-1 and backward n-1, ..., 0. One link may move the
    gradient of a layer once its backward is done. Forward i of the next step waits for gradient i.

    Args:
        forward_s, backward_s: times of each layer, in seconds.
        wire_s: time that each layer's gradient occupies the link when it travels alone.
    """
    graph = chain(forward_s, backward_s, [0] * len(wire_s))
    pieces = [[seconds] for seconds in wire_s]
    return play_steps(graph, due_date(graph, _IDLE), pieces, 0.0, fluid=True)


def step_bound_s(graph: Graph, link: LinkModel) -> float:
    """Lower bound on the step time for any order of transfers *and* ops, on any resources.

    No step is shorter than the work of a resource, or than the wire time of all gradients. The same
    holds for each set of gradients: all of them travel between the first readiness and the last
    arrival. Between that arrival and the next readiness lies the work that needs the arrived
    gradient and that the next ready one needs. Equal to :func:`program_optimum_s` on chains.

    Source:
        The worst set is found by Jackson's preemptive schedule: Carlier, "The one-machine
        sequencing problem", European Journal of Operational Research 11, 1982.
    """
    travel = [i for i, producers in enumerate(graph.producers) if producers]
    wire_s = [graph.parameters[i].size_bytes * link.seconds_per_byte for i in travel]
    before, after = _ancestors(graph), _descendants(graph)
    pasts = [_union(before[op] for op in graph.producers[i]) for i in travel]
    # A gradient without reader is awaited where it is next computed, see program.py.
    futures = [_union(after[op] for op in graph.readers[i] or graph.producers[i]) for i in travel]

    bounds = [math.fsum(wire_s)]
    for resource in graph.resources:
        times = [op.duration_s if op.resource == resource else 0.0 for op in graph.ops]
        total_s = math.fsum(times)
        jobs = []
        for past, future, wire in zip(pasts, futures, wire_s, strict=True):
            bounds.append(wire + _work_s(past & future, times))
            # Two sets share at least the sum of their work minus all work.
            jobs.append(_GradientJob(_work_s(past, times) - total_s, wire, _work_s(future, times)))
        bounds += [total_s, _latest_end_s(jobs)]
    return max(bounds)


@dataclass(frozen=True)
class _GradientJob:
    """A gradient as a job in one-machine scheduling with heads and tails.

    Attributes:
        head_s: time of readiness: minus the work that need not precede the gradient.
        tail_s: work that has to follow the gradient's arrival.
    """

    head_s: float
    wire_s: float
    tail_s: float


def _latest_end_s(jobs: Sequence[_GradientJob]) -> float:
    """Maximum over all sets of jobs of earliest head + all wire times + shortest tail."""
    queue = LinkQueue(fluid=True)
    earliest_s = min((job.head_s for job in jobs), default=0.0)
    for i, job in sorted(enumerate(jobs), key=lambda item: item[1].head_s):
        queue.add(i, (-job.tail_s,), job.head_s - earliest_s, [job.wire_s])
    ends = (earliest_s + queue.end_s(i) + job.tail_s for i, job in enumerate(jobs))
    return max(ends, default=0.0)


def _work_s(ops: int, times: Sequence[float]) -> float:
    return math.fsum(compress(times, bits(ops)))


def _union(sets: Iterable[int]) -> int:
    return functools.reduce(operator.or_, sets, 0)


def _ancestors(graph: Graph) -> list[int]:
    """For each op, the set of the op and all ops that it depends on."""
    sets: list[int] = []
    for k, op in enumerate(graph.ops):
        mask = 1 << k
        for name in op.inputs:
            mask |= sets[graph.op_position[name]]
        sets.append(mask)
    return sets


def _descendants(graph: Graph) -> list[int]:
    """For each op, the set of the op and all ops that depend on it."""
    sets = [1 << k for k in range(len(graph.ops))]
    for k in reversed(range(len(graph.ops))):
        for name in graph.ops[k].inputs:
            sets[graph.op_position[name]] |= sets[k]
    return sets
