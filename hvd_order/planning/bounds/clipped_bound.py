"""Shortest steps of models whose gradients are clipped by their global norm.

An all-reduce is a reduce-scatter and an all-gather, each with half of its wire time. The norm needs
every reduce-scatter, and no update may begin before the norm is known. It needs no all-gather:
each rank adds the squares of its own part of the sums. So all-gathers may travel during the next
forward pass, as whole all-reduces may where nothing is clipped.

The link is that of `bound`: it moves bytes at its rate, interrupts at no cost and has no latency.
docs/theory.md, "With clipping by the global norm", proves that the bounds are exact.

Three functions take a chain as `bound.chain_optimum_s` does. One device computes forward 0, 1,
..., n-1 and then backward n-1, ..., 0. The gradient of a layer is complete when its backward is.
Forward i of the next step waits for the norm and for all-gather i; a layer without bytes waits for
the norm as well, because its parameters could not be updated before.

Two facts make a step of a chain independent of the one before, so that each of their bounds is a
closed form. All gathers end before forward n-1 starts, so the link is empty when a backward pass
begins. And the work of a set of transfers that the link serves whenever it can ends at the latest
of "some release, and everything of the set that is released then or later".

`clipped_program_optimum_s` takes any graph of one resource and plays step after step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from hvd_order.base.link.link_model import LinkModel
from hvd_order.planning.graph.graph import Graph
from hvd_order.planning.orders.due_date import due_date
from hvd_order.planning.steps.delivery import LinkQueue
from hvd_order.planning.steps.program import play

__all__ = [
    "clipped_chain_optimum_s",
    "clipped_program_optimum_s",
    "late_gather_chain_s",
    "unsplit_clipped_chain_s",
]


def clipped_program_optimum_s(graph: Graph, link: LinkModel, barrier_s: float = 0.0) -> float:
    """Shortest step time of any order of the halves while ops run in program order. Attainable.

    The rule is that of :func:`clipped_chain_optimum_s`; halves of an earlier step go first.

    Args:
        barrier_s: same as there.

    Raises:
        InvalidUsage: the graph has several resources.

    Source:
        docs/theory.md.
    """
    priorities = due_date(graph, link)
    urgency = [priorities[parameter.name] for parameter in graph.parameters]
    half_s = [p.size_bytes * link.seconds_per_byte / 2 for p in graph.parameters]
    return play(graph, _Halves(urgency, half_s, barrier_s, LinkQueue(fluid=True)))


@dataclass
class _Halves:
    """Two transfers for each gradient, and the norm between them; see `program.Travel`."""

    urgency: Sequence[float]
    half_s: Sequence[float]
    barrier_s: float
    queue: LinkQueue
    _scattered: dict[int, list[int]] = field(default_factory=dict)  # by step, until its norm
    _norm_s: float = 0.0  # when the last norm was known

    def send(self, step: int, parameter: int, ready_s: float) -> None:
        half_s = [self.half_s[parameter]]
        self._scattered.setdefault(step, []).append(parameter)
        self.queue.add((step, parameter, "scatter"), (step, 0, 0), ready_s, half_s)
        # Behind all scatters of the step, so it need not wait for its own to be added.
        urgency = (step, 1, self.urgency[parameter])
        self.queue.add((step, parameter, "gather"), urgency, ready_s, half_s)

    def arrival_s(self, step: int, parameter: int) -> float:
        scattered = self._scattered.pop(step, None)
        if scattered is not None:
            ends_s = (self.queue.end_s((step, i, "scatter")) for i in scattered)
            self._norm_s = max(ends_s) + self.barrier_s
        return max(self._norm_s, self.queue.end_s((step, parameter, "gather")))


def clipped_chain_optimum_s(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    wire_s: Sequence[float],
    barrier_s: float = 0.0,
) -> float:
    """Shortest step time with split all-reduces: no order of the halves is faster. Attainable.

    A gather may follow its scatter at once. The best order is: reduce-scatters before all-gathers,
    gathers in the order in which layers read. So gathers use what the backward pass leaves idle.

    Args:
        forward_s, backward_s: times of each layer, in seconds.
        wire_s: time that the whole all-reduce of each layer's gradient occupies the link when it
            travels alone; either half takes half of it.
        barrier_s: from the end of the last reduce-scatter until all ranks know the norm. Gathers go
            on meanwhile.

    Returns:
        Seconds from the start of a forward pass to the start of the next one.

    Source:
        Horn, "Some simple scheduling algorithms", Naval Research Logistics 21, 1974, and
        docs/theory.md for the halves and for steps that follow each other.
    """
    half_s = [seconds / 2 for seconds in wire_s]
    release_s = _releases_s(backward_s)
    norm_s = _last_end_s(release_s, half_s) + barrier_s
    # Everything that should be over when forward i starts: all scatters, and gathers 0 to i.
    before_s = list(half_s)
    ready_s = []
    for i, gather_s in enumerate(half_s):
        before_s[i] += gather_s
        ready_s.append(max(norm_s, _last_end_s(release_s, before_s)))
    return _step_s(forward_s, backward_s, norm_s, ready_s)


def late_gather_chain_s(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    wire_s: Sequence[float],
    barrier_s: float = 0.0,
) -> float:
    """As :func:`clipped_chain_optimum_s`, but no gather begins before the norm is known.

    This is the best that a system can do which gathers clipped gradients, or updated parameters. It
    leaves the link idle where the backward pass outlasts its scatters, and can then be slower than
    :func:`unsplit_clipped_chain_s`.
    """
    half_s = [seconds / 2 for seconds in wire_s]
    norm_s = _last_end_s(_releases_s(backward_s), half_s) + barrier_s
    ready_s = [norm_s + gathered_s for gathered_s in accumulate(half_s)]
    return _step_s(forward_s, backward_s, norm_s, ready_s)


def unsplit_clipped_chain_s(
    forward_s: Sequence[float], backward_s: Sequence[float], wire_s: Sequence[float]
) -> float:
    """Shortest step time with whole all-reduces, all of which have to arrive before the norm.

    The best that DistributedDataParallel can reach. No norm is exchanged: each rank has all sums.
    Arguments and result are those of :func:`clipped_chain_optimum_s`.
    """
    norm_s = _last_end_s(_releases_s(backward_s), wire_s)
    return _step_s(forward_s, backward_s, norm_s, [norm_s] * len(wire_s))


def _releases_s(backward_s: Sequence[float]) -> list[float]:
    """When each layer's gradient is complete, from the end of the backward pass: never above 0."""
    return [-before_s for before_s in accumulate(backward_s, initial=0.0)][: len(backward_s)]


def _last_end_s(release_s: Sequence[float], work_s: Sequence[float]) -> float:
    """When a link that is never idle without cause ends all work; layer 0 is released last.

    Without layers it is 0, the end of the backward pass.
    """
    from_here_s = accumulate(work_s)
    return max((a + b for a, b in zip(release_s, from_here_s, strict=True)), default=0.0)


def _step_s(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    norm_s: float,
    ready_s: Sequence[float],
) -> float:
    """The step whose forward i starts at ``ready_s[i]`` or later, and not before the norm.

    Both are counted from the end of the backward pass.
    """
    now_s = norm_s
    for layer_s, begin_s in zip(forward_s, ready_s, strict=True):
        now_s = max(now_s, begin_s) + layer_s
    return now_s + math.fsum(backward_s)
