"""In which order a step needs its variables, read from its graph while that is traced.

What counts is the first operation that joins a variable's value with the step's data: where a
value is only cast or reshaped, nobody waits for it yet. Sooner is what lies behind fewer
operations, not what was created first, since branches run side by side. Data are what the step is
given, what its stateful operations bring, and tensors that it refers to from outside.

The time that it takes is proportional to the size of the graph: what a value is made of is kept as
references to what its parts are made of, never as a list of variables, which would double at every
sum of two values that are made of the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

__all__ = ["Join", "consumption_order", "joins"]

_READS = {"ReadVariableOp", "VarHandleOp", "VarIsInitializedOp", "VariableShape"}


@dataclass(frozen=True, eq=False)
class _Made:
    """What a value without data is made of: a variable, or other such values."""

    place: int | None = None
    parts: tuple[_Made, ...] = ()


@dataclass(frozen=True)
class Join:
    """An operation that depends on data.

    Attributes:
        op: TensorFlow's operation.
        depth: operations on the longest way from the data.
        inputs: the operations before it.
        made_of: what else goes into it.
    """

    op: Any
    depth: int
    inputs: tuple[Any, ...]
    made_of: tuple[_Made, ...]

    @property
    def reads(self) -> tuple[int, ...]:
        """Places of variables whose values it joins with data."""
        return tuple(_places(self.made_of, set()))


def _places(values: Iterable[_Made], seen: set[_Made]) -> Iterator[int]:
    """The variables behind values, except for what has been seen."""
    left = list(reversed(tuple(values)))
    while left:
        value = left.pop()
        if value in seen:
            continue
        seen.add(value)
        if value.place is not None:
            yield value.place
        left.extend(reversed(value.parts))


def joins(graph: Any, variables: Sequence[Any]) -> Iterator[Join]:
    """All operations of a function's graph that depend on data, in an order that fits."""
    place_of_handle = {id(variable.handle): place for place, variable in enumerate(variables)}
    captured = {inner.op: outer for outer, inner in graph.captures}
    brings_data: dict[str, bool] = {}  # by type
    depth: dict[Any, int] = {}
    made: dict[Any, _Made] = {}  # of the other operations, those that variables go into
    # While it is traced, operations come after their inputs.
    for op in graph.get_operations():
        outer = captured.get(op)
        if outer is not None:
            place = place_of_handle.get(id(outer))
            if place is not None:
                made[op] = _Made(place)
            elif _is_data(outer):
                depth[op] = 0
                yield Join(op, 0, (), ())
            continue
        before = tuple(dict.fromkeys(source.op for source in op.inputs))
        made_of = tuple(dict.fromkeys(made[source] for source in before if source in made))
        behind = [depth[source] for source in before if source in depth]
        if op.type not in brings_data:  # asked once: a definition is made anew for every answer
            brings_data[op.type] = _brings_data(op)
        if behind or brings_data[op.type]:
            depth[op] = max(behind, default=-1) + 1
            yield Join(op, depth[op], before, made_of)
        elif made_of:
            made[op] = made_of[0] if len(made_of) == 1 else _Made(parts=made_of)


def _is_data(captured: Any) -> bool:
    """Whether a tensor from outside is data of the step: no handle, and no mere factor."""
    return captured.dtype not in (tf.resource, tf.variant) and captured.shape.rank != 0


def _brings_data(op: Any) -> bool:
    """Whether operations of this type give data from nothing."""
    if op.type == "Placeholder":
        return True
    return op.op_def is not None and op.op_def.is_stateful and op.type not in _READS


def consumption_order(variables: Sequence[Any]) -> list[int]:
    """Places of the variables, the one that is needed first in front.

    Call it in the function that is being traced, when its forward pass is there. Outside of one
    the given order is returned; what no operation joins with data comes last.
    """
    graph = tf.compat.v1.get_default_graph()
    places = range(len(variables))
    if tf.executing_eagerly() or not hasattr(graph, "captures"):
        return list(places)
    found = [join for join in joins(graph, variables) if join.made_of]
    found.sort(key=lambda join: join.depth)  # among equals, what was created first
    seen: set[_Made] = set()
    needed: dict[int, int] = {}
    for position, join in enumerate(found):
        for place in _places(join.made_of, seen):
            needed.setdefault(place, position)
    return sorted(places, key=lambda place: needed.get(place, len(found)))
