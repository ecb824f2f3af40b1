"""Converts a recorded step to the simulator's workload."""

from __future__ import annotations

import math
from collections.abc import Mapping

from hvd_order.base.link.link_model import LinkModel
from hvd_order.planning.graph.graph import Graph
from hvd_order.planning.graph.priorities import Priorities
from hvd_order.planning.orders.due_date import due_date
from hvd_order.planning.predict.simulate import ScenarioOp, ScenarioParameter, StepWorkload

__all__ = ["consumption_order", "workload_of"]


def consumption_order(graph: Graph) -> list[str]:
    """Names of the parameters with gradient, in the order of the next forward pass.

    It is the order of the gradient buffers. Ties keep the order of the graph.
    """
    return _in_order(graph, due_date(graph, LinkModel(0.0, 0.0, 0.0)))


def workload_of(
    graph: Graph,
    priorities: Priorities | None = None,
    wire_bytes: Mapping[str, int] | None = None,
) -> StepWorkload:
    """Converts ops and gradients for the simulator.

    The update ops become one update for each parameter, which can follow the arrival of its
    gradient; their total time is spread by bytes. A parameter without gradient is left out, since
    it does not travel.

    Args:
        priorities: consumption order of the parameters; None: by first reader.
        wire_bytes: what travels of some gradients, if it is not the gradient.
    """
    names = consumption_order(graph) if priorities is None else _in_order(graph, priorities)
    number = {name: i for i, name in enumerate(names)}
    sizes = {p.name: p.size_bytes for p in graph.parameters}
    update_s = math.fsum(op.duration_s for op in graph.ops if op.phase == "update")
    update_s_per_byte = update_s / max(sum(sizes[name] for name in names), 1)

    kept = [op for op in graph.ops if op.phase != "update" or op.produces]
    place = {op.name: i for i, op in enumerate(kept)}
    sent = {**sizes, **(wire_bytes or {})}
    streams = {name: i for i, name in enumerate(graph.resources)}
    return StepWorkload(
        [
            ScenarioOp(
                op.name,
                op.duration_s if op.phase != "update" else 0.0,
                [place[name] for name in op.inputs if name in place],
                [number[name] for name in op.reads if name in number],
                [number[name] for name in op.produces],
                stream=streams[op.resource],
            )
            for op in kept
        ],
        [ScenarioParameter(name, sent[name], sizes[name] * update_s_per_byte) for name in names],
    )


def _in_order(graph: Graph, priorities: Priorities) -> list[str]:
    with_gradient = [
        parameter.name
        for parameter, producers in zip(graph.parameters, graph.producers, strict=True)
        if producers
    ]
    return sorted(with_gradient, key=priorities.__getitem__)
