"""The consumption order of a step's variables, read from its graph during tracing.

The first operation that joins a variable's value with the step's data decides; a cast or reshape of
the value alone does not count. An operation is earlier if fewer operations precede it, not if it
was created first, since branches run in parallel. Data are the arguments of the step, the results
of its stateful operations, and tensors that it captures.

The time is proportional to the size of the graph: a value refers to the origins of its parts
instead of listing variables. A list would double at every sum of two values of the same origin.
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
    """Origin of a value without data: a variable, or other such values."""

    place: int | None = None
    parts: tuple[_Made, ...] = ()


@dataclass(frozen=True)
class Join:
    """An operation that depends on data.

    Attributes:
        op: TensorFlow's operation.
        depth: operations on the longest path from the data.
        inputs: the operations before it.
        made_of: its other inputs, which do not depend on data.
    """

    op: Any
    depth: int
    inputs: tuple[Any, ...]
    made_of: tuple[_Made, ...]

    @property
    def reads(self) -> tuple[int, ...]:
        """Places of variables whose values the operation joins with data."""
        return tuple(_places(self.made_of, set()))


def _places(values: Iterable[_Made], seen: set[_Made]) -> Iterator[int]:
    """Variables from which values are computed, except those already seen."""
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
    """All operations of a function's graph that depend on data, in topological order."""
    place_of_handle = {id(variable.handle): place for place, variable in enumerate(variables)}
    captured = {inner.op: outer for outer, inner in graph.captures}
    brings_data: dict[str, bool] = {}  # by type
    depth: dict[Any, int] = {}
    made: dict[Any, _Made] = {}  # operations without data that use variables
    # During tracing, operations come after their inputs.
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
        if op.type not in brings_data:  # asked once: TensorFlow builds each answer anew
            brings_data[op.type] = _brings_data(op)
        if behind or brings_data[op.type]:
            depth[op] = max(behind, default=-1) + 1
            yield Join(op, depth[op], before, made_of)
        elif made_of:
            made[op] = made_of[0] if len(made_of) == 1 else _Made(parts=made_of)


def _is_data(captured: Any) -> bool:
    """Whether a captured tensor is data of the step: not a handle or a scalar factor."""
    return captured.dtype not in (tf.resource, tf.variant) and captured.shape.rank != 0


def _brings_data(op: Any) -> bool:
    """Whether operations of this type produce data without input."""
    if op.type == "Placeholder":
        return True
    return op.op_def is not None and op.op_def.is_stateful and op.type not in _READS


def consumption_order(variables: Sequence[Any]) -> list[int]:
    """Places of the variables in consumption order.

    Call it during tracing of a function, after its forward pass. Outside of tracing it returns the
    given order. Variables that no operation joins with data come last.
    """
    graph = tf.compat.v1.get_default_graph()
    places = range(len(variables))
    if tf.executing_eagerly() or not hasattr(graph, "captures"):
        return list(places)
    found = [join for join in joins(graph, variables) if join.made_of]
    found.sort(key=lambda join: join.depth)  # ties keep the order of creation
    seen: set[_Made] = set()
    needed: dict[int, int] = {}
    for position, join in enumerate(found):
        for place in _places(join.made_of, seen):
            needed.setdefault(place, position)
    return sorted(places, key=lambda place: needed.get(place, len(found)))
