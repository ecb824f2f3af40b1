"""Condenses a step: ops that run without a wait in between become one op.

A recorded step has thousands of operators, and few of them wait for a parameter or end a gradient.
"""

from __future__ import annotations

import math
from dataclasses import replace

from hvd_order.planning.graph.graph import Graph, GraphOp, GraphParameter
from hvd_order.planning.steps.program import first_uses

__all__ = ["condensed", "with_wire_sizes"]

_PLACE_BYTES = 64  # alignment of a gradient's place in its buffer (gradient_buffers.py)


def condensed(graph: Graph) -> Graph:
    """A graph whose steps take the same time, op for op, when ops run in program order.

    One resource runs its ops one after the other. So only the first reader of a parameter can wait
    for it, and only the last op that computes a gradient releases it. Ops between two such places
    become one. Dependencies are not kept, so heuristics have to use the original graph. A graph
    with several resources is returned unchanged.
    """
    if len(graph.resources) != 1:
        return graph
    waits: list[list[str]] = [[] for _ in graph.ops]
    ends: list[list[str]] = [[] for _ in graph.ops]
    for parameter, first, producers in zip(
        graph.parameters, first_uses(graph), graph.producers, strict=True
    ):
        if first is not None and producers:
            waits[first].append(parameter.name)
            ends[producers[-1]].append(parameter.name)

    groups: list[list[int]] = []
    for i, op in enumerate(graph.ops):
        goes_on = (
            groups
            and not waits[i]
            and not ends[i - 1]
            and (op.phase == "update") == (graph.ops[i - 1].phase == "update")
        )
        if goes_on:
            groups[-1].append(i)
        else:
            groups.append([i])
    ops = []
    for group in groups:
        first_op, last_op = graph.ops[group[0]], graph.ops[group[-1]]
        ops.append(
            GraphOp(
                first_op.name,
                math.fsum(graph.ops[i].duration_s for i in group),
                reads=tuple(waits[group[0]]),
                produces=tuple(ends[group[-1]]),
                resource=first_op.resource,
                phase=last_op.phase,
            )
        )
    return Graph(graph.parameters, tuple(ops))


def with_wire_sizes(graph: Graph) -> Graph:
    """Sets the size of each gradient to its bytes in the gradient buffer.

    A gradient's place is aligned and ends with its use flag, one element.
    """

    def on_wire(parameter: GraphParameter) -> GraphParameter:
        places = parameter.size_bytes // _PLACE_BYTES + 1
        return replace(parameter, size_bytes=_PLACE_BYTES * places)

    return Graph(tuple(map(on_wire, graph.parameters)), graph.ops)
