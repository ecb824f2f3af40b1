"""The graph and durations that one worker's recording makes of a model."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.runner.workloads.profiles import Profile
from hvd_order.planning.graph.graph import Graph, GraphOp, GraphParameter

_ELEMENT_BYTES = 4


def graph_of(
    profile: Profile, recorded: Sequence[Sequence[Any]], updates_s: Sequence[float] = ()
) -> tuple[Graph, list[list[float]]]:
    """The graph of recorded layers, and its durations by step and op.

    Args:
        recorded: of each step (name, "forward" or "backward", begin, end) of each layer.
        updates_s: of each step, if the worker itself updates.

    In the backward pass nothing waits, so a layer takes the time since the layer before ended,
    with hooks and copies. In the forward pass layers wait for parameters; their own time counts.
    """
    layers = profile.layers
    parameters, ops = [], []
    for i, layer in enumerate(layers):
        names = tuple(f"{i}.{k}" for k in range(len(layer.tensors)))
        parameters += [
            GraphParameter(name, n * _ELEMENT_BYTES)
            for name, n in zip(names, layer.tensors, strict=True)
        ]
        before = (f"f{i - 1}",) if i else ()
        ops.append(GraphOp(f"f{i}", layer.forward_s, before, names))
    for i in reversed(range(len(layers))):
        names = tuple(f"{i}.{k}" for k in range(len(layers[i].tensors)))
        before = (f"b{i + 1}",) if i + 1 < len(layers) else (f"f{i}",)
        ops.append(GraphOp(f"b{i}", layers[i].backward_s, before, (), names, phase="backward"))
    rows = []
    for events in recorded:
        forward = [(begin, end) for _, kind, begin, end in events if kind == "forward"]
        backward = [end for _, kind, _, end in events if kind == "backward"]
        starts = [forward[-1][1], *backward[:-1]]
        rows.append(
            [end - begin for begin, end in forward]
            + [end - start for start, end in zip(starts, backward, strict=True)]
        )
    if updates_s:
        ops.append(GraphOp("update", 0.0, ("b0",), (), (), phase="update"))
        rows = [[*row, update_s] for row, update_s in zip(rows, updates_s, strict=True)]
    medians = [statistics.median(of_op) for of_op in zip(*rows, strict=True)]
    timed = [replace(op, duration_s=s) for op, s in zip(ops, medians, strict=True)]
    return Graph(tuple(parameters), tuple(timed)), rows
