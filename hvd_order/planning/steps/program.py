"""Steps whose ops run in program order, as in PyTorch: a single step, and consecutive steps.

Each resource runs its ops one after the other in the order of the graph. An op waits for the op
before it, for its inputs, and for the parameters that it is the first to read. A parameter that no
op reads is awaited where its gradient is next computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from hvd_order.base.errors import InvalidUsage
from hvd_order.base.link.link_model import LinkModel
from hvd_order.planning.graph.graph import Graph
from hvd_order.planning.graph.priorities import Priorities
from hvd_order.planning.steps.delivery import GradientDelivery, LinkQueue, piece_times

__all__ = [
    "Travel",
    "first_uses",
    "gradient_transfers",
    "play",
    "play_steps",
    "steady_step_s",
    "unhindered",
]

_MOST_STEPS = 64
_STEADY = 1e-9  # relative: rounding, not change


def unhindered(graph: Graph) -> list[tuple[float, float]]:
    """Begin and end of each op in seconds if every parameter is available from the start."""
    free: dict[str, float] = {}
    times: list[tuple[float, float]] = []
    for op in graph.ops:
        inputs = [times[graph.op_position[name]][1] for name in op.inputs]
        begin = max([free.get(op.resource, 0.0), *inputs])
        times.append((begin, begin + op.duration_s))
        free[op.resource] = begin + op.duration_s
    return times


def first_uses(graph: Graph) -> list[int | None]:
    """For each parameter, the op that first waits for it; None if no op reads or computes it."""
    times = unhindered(graph)
    return [
        min(readers or producers, key=lambda op: (times[op][0], op), default=None)
        for readers, producers in zip(graph.readers, graph.producers, strict=True)
    ]


def gradient_transfers(graph: Graph) -> list[GradientDelivery]:
    """All gradients of a step with release times, and due times in the next step."""
    times = unhindered(graph)
    step_s = max((end for _, end in times), default=0.0)
    return [
        GradientDelivery(
            parameter.name,
            parameter.size_bytes,
            release_s=max(times[op][1] for op in producers),
            due_s=step_s + times[first][0],
        )
        for parameter, first, producers in zip(
            graph.parameters, first_uses(graph), graph.producers, strict=True
        )
        if first is not None and producers
    ]


def steady_step_s(
    graph: Graph, priorities: Priorities, link: LinkModel, slice_bytes: int | None = None
) -> float:
    """Steady-state step time if transfers overlap with the next step.

    Args:
        slice_bytes: same as in `delivery.deliver`; one slice in flight at a time.

    Raises:
        InvalidUsage: the graph has several resources, which need the simulator.
    """
    pieces = [piece_times(p.size_bytes, link, slice_bytes) for p in graph.parameters]
    latency_s = 0.0 if slice_bytes is None else link.latency_s
    return play_steps(graph, priorities, pieces, latency_s, fluid=slice_bytes is None)


def play_steps(
    graph: Graph,
    priorities: Priorities,
    piece_s: Sequence[Sequence[float]],
    latency_s: float,
    *,
    fluid: bool,
) -> float:
    """Same as :func:`steady_step_s`, but with the time of each piece of each parameter given."""
    urgency = [priorities[parameter.name] for parameter in graph.parameters]
    return play(graph, _Whole(urgency, piece_s, latency_s, LinkQueue(fluid=fluid)))


class Travel(Protocol):
    """How gradients travel. A gradient is a step and a parameter's place in the graph."""

    queue: LinkQueue

    def send(self, step: int, parameter: int, ready_s: float) -> None:
        """Adds a gradient that became ready."""

    def arrival_s(self, step: int, parameter: int) -> float:
        """Time from which the parameter can be read. All gradients of that step have been sent."""


@dataclass
class _Whole:
    """One transfer for each gradient."""

    urgency: Sequence[float]
    piece_s: Sequence[Sequence[float]]
    latency_s: float
    queue: LinkQueue

    def send(self, step: int, parameter: int, ready_s: float) -> None:
        key, urgency = (step, parameter), (step, self.urgency[parameter])
        self.queue.add(key, urgency, ready_s, self.piece_s[parameter])

    def arrival_s(self, step: int, parameter: int) -> float:
        return self.queue.end_s((step, parameter)) + self.latency_s


def play(graph: Graph, travel: Travel) -> float:
    """Step time in the steady state.

    Raises:
        InvalidUsage: the graph has several resources, which need the simulator.
    """
    if len(graph.resources) > 1:
        raise InvalidUsage(
            f"the graph has ops on {', '.join(graph.resources)}; program order alone does not say "
            "how they meet (bound.step_bound_s holds for any number of resources)"
        )
    waits: list[list[int]] = [[] for _ in graph.ops]
    sends: list[list[int]] = [[] for _ in graph.ops]
    for i, first in enumerate(first_uses(graph)):
        if first is not None and graph.producers[i]:
            waits[first].append(i)
            sends[graph.producers[i][-1]].append(i)

    now_s = 0.0
    starts: list[float] = []
    backlogs: list[float] = []
    for step in range(_MOST_STEPS):
        travel.queue.advance(now_s)
        starts.append(now_s)
        backlogs.append(travel.queue.backlog_s)
        if _is_steady(starts, backlogs):
            return starts[-1] - starts[-2]
        for k, op in enumerate(graph.ops):
            for i in waits[k] if step else ():
                now_s = max(now_s, travel.arrival_s(step - 1, i))
            now_s += op.duration_s
            for i in sends[k]:
                travel.send(step, i, now_s)
    # Steps alternate between a few lengths; take their mean.
    half = _MOST_STEPS // 2
    return (starts[-1] - starts[half - 1]) / (_MOST_STEPS - half)


def _is_steady(starts: Sequence[float], backlogs: Sequence[float]) -> bool:
    """Whether a step had the same duration and link backlog as the one before."""
    if len(starts) < 4:  # the first step waits for nothing
        return False
    before_s, last_s = (end - begin for begin, end in pairwise(starts[-3:]))
    little_s = _STEADY * last_s
    return abs(last_s - before_s) <= little_s and abs(backlogs[-1] - backlogs[-2]) <= little_s
