"""In which order a step needs its variables, read from its graph while that is traced.

What counts is the first operation that joins a variable's value with the step's data: where a
value is only cast or reshaped, nobody waits for it yet. Sooner is what lies behind fewer
operations, not what was created first, since branches run side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

__all__ = ["Join", "consumption_order", "joins"]

_READS = {"ReadVariableOp", "VarHandleOp", "VarIsInitializedOp", "VariableShape"}


@dataclass(frozen=True)
class Join:
    """An operation that depends on data.

    Attributes:
        op: TensorFlow's operation.
        depth: operations on the longest way from the data.
        reads: places of variables whose values it joins with data.
    """

    op: Any
    depth: int
    reads: tuple[int, ...]


def joins(graph: Any, variables: Sequence[Any]) -> Iterator[Join]:
    """All operations of a function's graph that depend on data, in an order that fits."""
    place_of_handle = {id(variable.handle): place for place, variable in enumerate(variables)}
    captured = {inner.op: outer for outer, inner in graph.captures}
    depth: dict[Any, int] = {}
    weights: dict[Any, list[int]] = {}  # the other operations: the variables they are made of
    # While it is traced, operations come after their inputs.
    for op in graph.get_operations():
        if op in captured:
            place = place_of_handle.get(id(captured[op]))
            weights[op] = [] if place is None else [place]
            continue
        before = [source.op for source in op.inputs]
        made_of = [place for source in before for place in weights.get(source, ())]
        behind = [depth[source] for source in before if source in depth]
        brings_data = op.type == "Placeholder" or (
            op.op_def is not None and op.op_def.is_stateful and op.type not in _READS
        )
        if behind or brings_data:
            depth[op] = max(behind, default=-1) + 1
            yield Join(op, depth[op], tuple(dict.fromkeys(made_of)))
        else:
            weights[op] = made_of


def consumption_order(variables: Sequence[Any]) -> list[int]:
    """Places of the variables, the one that is needed first in front.

    Call it in the function that is being traced, when its forward pass is there. Outside of one
    the given order is returned; what no operation joins with data comes last.
    """
    graph = tf.compat.v1.get_default_graph()
    places = range(len(variables))
    if tf.executing_eagerly() or not hasattr(graph, "captures"):
        return list(places)
    needed: dict[int, tuple[float, int]] = {}
    for position, join in enumerate(joins(graph, variables)):
        for place in join.reads:
            found = (join.depth, position)
            needed[place] = min(needed.get(place, found), found)
    return sorted(places, key=lambda place: needed.get(place, (float("inf"), 0)))
