"""Units of transfer: whole tensors, or slices of P3. merge.py merges tensors."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_order.base.errors import InvalidUsage
from hvd_order.base.link.link_model import LinkModel
from hvd_order.planning.graph.graph import Graph
from hvd_order.planning.graph.priorities import Priorities

__all__ = ["P3_SLICE_BYTES", "PlannedSlice", "SlicePart", "p3", "whole_tensors"]

P3_SLICE_BYTES = 200_000
"""Slice size of P3: 50,000 parameters of 4 bytes, the best on the authors' four hosts."""


@dataclass(frozen=True)
class SlicePart:
    """Byte range of one parameter's gradient."""

    parameter: str
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True)
class PlannedSlice:
    """The unit of transfer; an issued slice is not interrupted.

    Attributes:
        priority: 0 goes first; equal priorities in any order.
    """

    parts: tuple[SlicePart, ...]
    priority: int

    @property
    def size_bytes(self) -> int:
        """Total size of all parts."""
        return sum(part.size_bytes for part in self.parts)


def whole_tensors(graph: Graph, link: LinkModel, priorities: Priorities) -> list[PlannedSlice]:
    """One slice for each gradient: TicTac, and DDP without buckets."""
    del link
    return _cut(graph, priorities, max((1, *(p.size_bytes for p in graph.parameters))))


def p3(
    graph: Graph, link: LinkModel, priorities: Priorities, slice_bytes: int = P3_SLICE_BYTES
) -> list[PlannedSlice]:
    """Cuts large gradients into slices of equal size; small ones are one slice each.

    A slice has the priority of its tensor.

    Source:
        Jayarajan et al., "Priority-based parameter propagation", SysML 2019 (arXiv 1905.03960),
        section 4.

    Raises:
        InvalidUsage: ``slice_bytes`` is not positive.
    """
    del link
    if slice_bytes <= 0:
        raise InvalidUsage(f"a slice of {slice_bytes} bytes carries nothing; give a positive size")
    return _cut(graph, priorities, slice_bytes)


def _cut(graph: Graph, priorities: Priorities, slice_bytes: int) -> list[PlannedSlice]:
    return [
        PlannedSlice(
            (SlicePart(p.name, at, min(slice_bytes, p.size_bytes - at)),), priorities[p.name]
        )
        for p, producers in zip(graph.parameters, graph.producers, strict=True)
        if producers
        for at in range(0, p.size_bytes, slice_bytes) or (0,)
    ]
