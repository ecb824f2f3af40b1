"""A plan for one cell, as `hvd-order tune` makes it: from recorded times and the link."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.runner.fleet import Fleet
from benchmarks.runner.workloads.profiles import PROFILES
from hvd_order.base.link.link_model import LinkModel
from hvd_order.planning.files.profile import MeasuredLink
from hvd_order.planning.graph.graph import Graph, GraphOp, GraphParameter
from hvd_order.planning.predict.network import Network
from hvd_order.planning.predict.tune import tune


def write_plan(
    fleet: Fleet, model: str, layer_s: Sequence[tuple[float, float]], path: Path, clipped: bool
) -> None:
    """Measures the link between a fleet's ranks and writes the plan that fits an emulated model.

    Args:
        layer_s: what each layer's forward and backward pass was measured to take.
        clipped: whether gradients are clipped by their global norm in every step.
    """
    measured = fleet("link")[0]
    link = MeasuredLink(LinkModel(**measured["link"]), measured["ranks"], measured["backend"])
    graph = _graph(model, layer_s)
    tune(graph, Network.of_link(link), model, clipped=clipped).plan.write(path)


def _graph(model: str, layer_s: Sequence[tuple[float, float]]) -> Graph:
    """The chain of layers, with the names that the emulated model's parameters have."""
    layers = PROFILES[model]().layers
    names = [
        [f"{i}.tensors.{k}" for k in range(len(each.tensors))] for i, each in enumerate(layers)
    ]
    parameters = [
        GraphParameter(name, 4 * size)
        for layer, mine in zip(layers, names, strict=True)
        for name, size in zip(mine, layer.tensors, strict=True)
    ]
    ops: list[GraphOp] = []
    for i, (forward_s, _) in enumerate(layer_s):
        before = (ops[-1].name,) if ops else ()
        ops.append(GraphOp(f"forward {i}", forward_s, before, reads=tuple(names[i])))
    for i, (_, backward_s) in reversed(list(enumerate(layer_s))):
        ops.append(GraphOp(f"backward {i}", backward_s, (ops[-1].name,), (), tuple(names[i]),
                      phase="backward"))  # fmt: skip
    return Graph(tuple(parameters), tuple(ops))
