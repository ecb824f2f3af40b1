"""How short a step with all-reduce can be: exact in program order, a lower bound in any order.

Synchronous steps, one after the other: no op of a step runs before all ops of the last have. The
link moves bytes at its rate, interrupts at no cost and has no latency; whatever is real is slower.
docs/planning.md has the proofs and says how tight the bound is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

from hvd_order.plan.cut import Link
from hvd_order.plan.delivery import LinkQueue
from hvd_order.plan.due_date import due_date
from hvd_order.plan.graph import Graph, bits
from hvd_order.plan.program import play_steps, steady_step_s
from hvd_order.plan.synthetic import chain

__all__ = ["chain_optimum_s", "program_optimum_s", "step_bound_s"]

_IDLE = Link(0.0, 0.0, 0.0)
_HALVINGS = 60


def program_optimum_s(graph: Graph, link: Link) -> float:
    """Step time that no order of transfers can beat while ops run in program order. Attainable.

    Raises:
        InvalidUsage: the graph has several resources.

    Source:
        Horn, "Some simple scheduling algorithms", Naval Research Logistics 21, 1974, and
        docs/planning.md for steps that follow each other.
    """
    return steady_step_s(graph, due_date(graph, link), link)


def chain_optimum_s(
    forward_s: Sequence[float], backward_s: Sequence[float], wire_s: Sequence[float]
) -> float:
    """:func:`program_optimum_s` of a chain of layers.

    One device computes forward 0, 1, ..., n-1 and backward n-1, ..., 0; one link moves the gradient
    of a layer as soon as its backward is done. Forward i of the next step waits for gradient i.

    Args:
        forward_s, backward_s: by layer, in seconds.
        wire_s: how long the layer's gradient occupies the link when it has it for itself.
    """
    graph = chain(forward_s, backward_s, [0] * len(wire_s))
    pieces = [[seconds] for seconds in wire_s]
    return play_steps(graph, due_date(graph, _IDLE), pieces, 0.0, fluid=True)


@dataclass(frozen=True)
class _Job:
    """A gradient seen from the end of its step, as one job of a machine with heads and tails.

    Attributes:
        head_s: it is ready at the earliest so long after that end; negative, or None if it may be
            ready while the step still waits for something.
        work_before_s: what has to be computed before it is ready.
        tail_s: what has to be computed after it has arrived.
        circle_s: what has to be computed between its arrival and its being ready again.
    """

    head_s: float | None
    work_before_s: float
    wire_s: float
    tail_s: float
    circle_s: float


def step_bound_s(graph: Graph, link: Link) -> float:
    """Step time that no order of transfers *and* of ops can beat, on any number of resources.

    No step is shorter than the work of a resource, than the bytes of all gradients, or than a
    gradient's way around: from its arrival to the next one. Beside that, the preemptive one-machine
    relaxation: of what depends on what, each gradient keeps the work that must precede it and the
    work that must follow it. Equal to :func:`program_optimum_s` on chains.

    Source:
        Jackson's preemptive schedule: Carlier, "The one-machine sequencing problem", European
        Journal of Operational Research 11, 1982, for the bound with heads and tails.
    """
    jobs = _jobs(graph, link)
    all_ops = (1 << len(graph.ops)) - 1
    floor_s = max(
        _Work(graph).most_s(all_ops),
        math.fsum(job.wire_s for job in jobs),
        *(job.circle_s + job.wire_s for job in jobs),
    )
    over_s = _latest_end_s(jobs, floor_s)
    if over_s <= floor_s or all(job.head_s is not None for job in jobs):
        return max(floor_s, over_s)
    # The longer the step, the earlier in it, counted from its end, some gradients may be ready:
    # the bound is the step time at which that agrees with itself.
    for _ in range(_HALVINGS):
        middle_s = (floor_s + over_s) / 2
        if _latest_end_s(jobs, middle_s) > middle_s:
            floor_s = middle_s
        else:
            over_s = middle_s
    return floor_s


def _latest_end_s(jobs: Sequence[_Job], step_s: float) -> float:
    """When the next step ends, after the end of this one, if steps take ``step_s``."""
    ready = [
        (job.work_before_s - step_s if job.head_s is None else job.head_s, job) for job in jobs
    ]
    queue = LinkQueue(fluid=True)
    earliest_s = min((ready_s for ready_s, _ in ready), default=0.0)
    by_tail = sorted(range(len(jobs)), key=lambda i: -jobs[i].tail_s)
    urgency = {i: place for place, i in enumerate(by_tail)}
    for i in sorted(range(len(jobs)), key=lambda i: ready[i][0]):
        queue.add(i, (urgency[i],), ready[i][0] - earliest_s, [jobs[i].wire_s])
    return max(
        (earliest_s + queue.end_s(i) + job.tail_s for i, job in enumerate(jobs)), default=0.0
    )


def _jobs(graph: Graph, link: Link) -> list[_Job]:
    before, after, work = _ancestors(graph), _descendants(graph), _Work(graph)
    everything = (1 << len(graph.ops)) - 1
    travel = [i for i, producers in enumerate(graph.producers) if producers]
    waits = {i: graph.readers[i] or graph.producers[i] for i in travel}  # see program.py
    waiting = {i: sum(1 << op for op in ops) for i, ops in waits.items()}
    jobs = []
    for i in travel:
        past = future = 0
        for op in graph.producers[i]:
            past |= before[op]
        for op in waits[i]:
            future |= after[op]
        # If all others have been read before this one is ready, nothing is waited for from then
        # on, and what is left of the step takes no longer than its ops in a row.
        read_all = all(waiting[other] & past for other in travel)
        jobs.append(
            _Job(
                head_s=-math.fsum(work.each_s(everything & ~past)) if read_all else None,
                work_before_s=work.most_s(past),
                wire_s=graph.parameters[i].size_bytes * link.seconds_per_byte,
                tail_s=work.most_s(future),
                circle_s=work.most_s(past & future),
            )
        )
    return jobs


def _ancestors(graph: Graph) -> list[int]:
    """Of each op: itself and all that it depends on, as a set of ops."""
    sets: list[int] = []
    for k, op in enumerate(graph.ops):
        mask = 1 << k
        for name in op.inputs:
            mask |= sets[graph.op_position[name]]
        sets.append(mask)
    return sets


def _descendants(graph: Graph) -> list[int]:
    """Of each op: itself and all that depend on it, as a set of ops."""
    sets = [1 << k for k in range(len(graph.ops))]
    for k in reversed(range(len(graph.ops))):
        for name in graph.ops[k].inputs:
            sets[graph.op_position[name]] |= sets[k]
    return sets


class _Work:
    """How long sets of ops keep the resources busy."""

    def __init__(self, graph: Graph) -> None:
        self._durations = [
            [op.duration_s if op.resource == resource else 0.0 for op in graph.ops]
            for resource in graph.resources
        ]

    def each_s(self, ops: int) -> list[float]:
        """By resource."""
        chosen = bits(ops)
        return [math.fsum(compress(durations, chosen)) for durations in self._durations]

    def most_s(self, ops: int) -> float:
        """Of the resource that has the most to do."""
        return max(self.each_s(ops), default=0.0)
