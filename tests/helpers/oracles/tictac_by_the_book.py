"""TicTac's properties, comparator and loop as printed, with nothing clever."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hvd_order.base.link.link_model import LinkModel, transfer_s
from hvd_order.planning.graph.graph import Graph, members


@dataclass
class Properties:
    """P, M and M+ of a transfer."""

    P: float
    M: float
    Mp: float


def update_properties(
    graph: Graph, link: LinkModel, outstanding: set[int]
) -> dict[int, Properties]:
    """UpdateProperties(G, Time, R), section 4.1."""
    time = [transfer_s(parameter.size_bytes, link) for parameter in graph.parameters]
    recv = {i: Properties(0.0, time[i], math.inf) for i in outstanding}
    for op, mask in zip(graph.ops, graph.needs, strict=True):
        dep = set(members(mask)) & outstanding
        if len(dep) == 1:
            recv[min(dep)].P += op.duration_s
        elif dep:
            M = math.fsum(time[i] for i in sorted(dep))  # noqa: N806
            for i in dep:
                recv[i].Mp = min(recv[i].Mp, M)
    return recv


def precedes_by_eq_6(a: Properties, b: Properties) -> bool:
    return min(b.P, a.M) < min(a.P, b.M)


def precedes(a: Properties, b: Properties) -> bool:
    """The comparator with ties to the smaller M+; no order where Eq. 6 has ties."""
    if min(b.P, a.M) != min(a.P, b.M):
        return precedes_by_eq_6(a, b)
    return a.Mp < b.Mp


def tac(graph: Graph, link: LinkModel) -> list[str]:
    outstanding, order = set(range(len(graph.parameters))), []
    while outstanding:
        recv = update_properties(graph, link, outstanding)
        first = min(outstanding)
        for i in sorted(outstanding):
            if precedes(recv[i], recv[first]):
                first = i
        order.append(graph.parameters[first].name)
        outstanding.remove(first)
    return order
