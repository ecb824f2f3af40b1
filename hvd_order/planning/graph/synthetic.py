"""A chain of layers as a graph."""

from __future__ import annotations

from collections.abc import Sequence

from hvd_order.planning.graph.graph import Graph, GraphOp, GraphParameter

__all__ = ["chain"]


def chain(
    forward_s: Sequence[float], backward_s: Sequence[float], size_bytes: Sequence[int]
) -> Graph:
    """A chain of layers with one parameter each, ``w0`` first: forward, then backward."""
    count = len(size_bytes)
    ops = []
    last: tuple[str, ...] = ()
    for i in range(count):
        ops.append(GraphOp(f"f{i}", forward_s[i], last, reads=(f"w{i}",)))
        last = (f"f{i}",)
    for i in reversed(range(count)):
        ops.append(GraphOp(f"b{i}", backward_s[i], last, produces=(f"w{i}",), phase="backward"))
        last = (f"b{i}",)
    return Graph(tuple(GraphParameter(f"w{i}", size_bytes[i]) for i in range(count)), tuple(ops))
