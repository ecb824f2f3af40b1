"""A scheduled step's graph, cut where its edges go from worker to server and back.

ParameterServerStrategy leaves the cut to TensorFlow: what takes a variable's handle runs where the
variable is, and an optimizer's arithmetic names the server's device. Everything else is a worker's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvd_order.base.errors import InvalidUsage
from hvd_order.planning.graph.graph import GraphOp, GraphParameter, Phase
from hvd_order.tensorflow.gradients.consumption import joins

__all__ = ["StepGraph", "step_graph", "trained_variables"]

_SERVER = "/job:ps"
_READS = {"ReadVariableOp", "VariableShape", "VarIsInitializedOp"}
_UPDATES = ("Assign", "ResourceApply")
_SPARSE = ("ResourceGather", "ResourceScatter", "ResourceSparseApply")
_BACKWARD = "gradient_tape/"


@dataclass(frozen=True)
class StepGraph:
    """What a worker computes and what travels.

    Attributes:
        parameters: in the order of the variables.
        ops: the worker's, without durations.
        fetches: nodes of servers whose values workers fetch -> parameter.
        updates: nodes of servers that apply a gradient -> parameter.
    """

    parameters: tuple[GraphParameter, ...]
    ops: tuple[GraphOp, ...]
    fetches: dict[str, str]
    updates: dict[str, str]


def step_graph(graph: Any, variables: Sequence[Any], names: Sequence[str]) -> StepGraph:
    """Cuts the graph of a concrete function.

    Args:
        graph: its FuncGraph.
        variables: TensorFlow's variables that are trained, on servers.
        names: of the parameters.

    Raises:
        InvalidUsage: a variable is on no server, is not updated by a dense gradient, or is used in
            a way that cannot be followed; the message names it.
    """
    handles = _handles(graph, variables, names)
    on_server = _on_servers(graph)
    behind = list(joins(graph, variables))
    known = {join.op for join in behind}
    sizes = [v.shape.num_elements() * v.dtype.size for v in variables]
    produced: dict[Any, list[str]] = defaultdict(list)
    updates: dict[str, str] = {}
    for place, name in enumerate(names):
        found = _before(_updates_of(handles[place], name), on_server)
        for op in found:
            updates.setdefault(op.name, name)
        for op in _gradients(found, on_server, known, sizes[place], name):
            produced[op].append(name)
    workers = [join for join in behind if join.op not in on_server]
    mine = {join.op for join in workers}
    ops: list[GraphOp] = []
    backward: set[str] = set()
    for join in workers:
        inputs = tuple(one.name for one in join.inputs if one in mine)
        name = join.op.name
        if name.startswith(_BACKWARD) or f"/{_BACKWARD}" in name or not backward.isdisjoint(inputs):
            backward.add(name)
        phase: Phase = "backward" if name in backward else "forward"
        reads = tuple(names[i] for i in join.reads)
        ops.append(GraphOp(name, 0.0, inputs, reads, tuple(produced.get(join.op, ())), phase=phase))
    parameters = tuple(GraphParameter(*pair) for pair in zip(names, sizes, strict=True))
    return StepGraph(parameters, tuple(ops), _fetches(handles, names, on_server), updates)


def trained_variables(graph: Any) -> list[Any]:
    """The variables that the graph of a concrete function trains, in the order of their making."""
    inside = {id(outer): inner for outer, inner in graph.captures}
    found = [
        variable
        for variable in graph.variables
        if variable.trainable
        and any(op.type not in _READS for op in inside[id(variable.handle)].consumers())
    ]
    return sorted(found, key=lambda variable: int(variable._unique_id.rpartition("_")[2]))


def _handles(graph: Any, variables: Sequence[Any], names: Sequence[str]) -> list[Any]:
    """The operation of the graph that stands for each variable's handle."""
    inside = {id(outer): inner.op for outer, inner in graph.captures}
    found = []
    for variable, name in zip(variables, names, strict=True):
        handle = variable.handle
        if _SERVER not in handle.device:
            raise InvalidUsage(
                f"the variable {name!r} is on {handle.device or 'no device'}, not on a parameter "
                "server; make variables in the scope of a ParameterServerStrategy"
            )
        if id(handle) not in inside:
            raise InvalidUsage(f"the step does not use the variable {name!r}")
        found.append(inside[id(handle)])
    return found


def _on_servers(graph: Any) -> set[Any]:
    """Operations that TensorFlow runs on servers."""
    theirs = {
        inner.op
        for outer, inner in graph.captures
        if outer.dtype == tf.resource and _SERVER in outer.device
    }
    return {
        op
        for op in graph.get_operations()
        if _SERVER in op.device or any(source.op in theirs for source in op.inputs)
    }


def _updates_of(handle: Any, name: str) -> list[Any]:
    """Operations that write a variable."""
    found = []
    for op in handle.outputs[0].consumers():
        if op.type in _READS:
            continue
        if op.type.startswith(_SPARSE):
            raise InvalidUsage(
                f"the variable {name!r} is used by {op.type} ({op.name}), so only some of its rows "
                "travel; a profile knows variables that travel as a whole"
            )
        if not op.type.startswith(_UPDATES):
            raise InvalidUsage(
                f"the variable {name!r} is used by {op.type} ({op.name}), whose inside cannot be "
                "followed; the step must use its variables itself, not in a function that it calls"
            )
        found.append(op)
    if not found:
        raise InvalidUsage(f"the step does not update the variable {name!r}")
    return found


def _before(updates: Iterable[Any], on_server: set[Any]) -> list[Any]:
    """Operations of a server that an update waits for, and the update."""
    found = dict.fromkeys(updates)
    left = list(found)
    while left:
        op = left.pop()
        for source in (*(one.op for one in op.inputs), *op.control_inputs):
            if source in on_server and source not in found:
                found[source] = None
                left.append(source)
    return list(found)


def _gradients(
    updates: Iterable[Any], on_server: set[Any], known: set[Any], size: int, name: str
) -> list[Any]:
    """Operations of the worker whose results the updates of a variable apply."""
    came = [
        source
        for op in updates
        for source in op.inputs
        if source.op in known and source.op not in on_server
    ]
    whole = [tensor for tensor in came if _size(tensor) in (size, None)]
    if not whole:
        raise InvalidUsage(
            f"no gradient of the variable {name!r}, {size} bytes, goes from a worker to its "
            "server; it must be as large as the variable and depend on the step's data"
        )
    return list(dict.fromkeys(tensor.op for tensor in whole))


def _size(tensor: Any) -> int | None:
    elements = tensor.shape.num_elements()
    return None if elements is None else elements * tensor.dtype.size


def _fetches(handles: Sequence[Any], names: Sequence[str], on_server: set[Any]) -> dict[str, str]:
    """Names of the operations on servers whose results a worker takes, with the parameter."""
    found = {}
    for handle, name in zip(handles, names, strict=True):
        for op in handle.outputs[0].consumers():
            if op.type == "ReadVariableOp" and any(
                user not in on_server for user in op.outputs[0].consumers()
            ):
                found[op.name] = name
    return found
