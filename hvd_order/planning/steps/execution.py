"""One step as the papers execute it: pulls over one channel, ops as soon as they can run.

A list scheduler. All parameters are requested at the start, and the channel moves one whole
parameter at a time. Each resource runs one op at a time and never idles while one of its ops could
run. For tests and for E and S of an order; the simulator has slices, credit and several workers.

Source:
    TicTac (MLSys 2019), section 3.1: a resource picks at random among the ready items with the
    lowest priority and those without priority.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from hvd_order.base.link.link_model import LinkModel, transfer_s
from hvd_order.planning.graph.graph import Graph
from hvd_order.planning.steps.efficiency import OverlapEfficiency, Span, overlap_of

__all__ = ["CHANNEL", "execute", "pull_overlap"]

CHANNEL = "channel"


def execute(graph: Graph, order: Sequence[int], link: LinkModel) -> list[Span]:
    """Computes the busy intervals of each resource.

    Args:
        order: positions of all parameters in sending order.
    """
    spans = []
    arrived = [0.0] * len(graph.parameters)
    now_s = 0.0
    for i in order:
        parameter = graph.parameters[i]
        begin_s, now_s = now_s, now_s + transfer_s(parameter.size_bytes, link)
        spans.append(Span(CHANNEL, parameter.name, begin_s, now_s))
        arrived[i] = now_s
    return spans + _run_ops(graph, arrived)


def pull_overlap(graph: Graph, order: Sequence[int], link: LinkModel) -> OverlapEfficiency:
    """OverlapEfficiency (E and S) of a step with pulls in this order."""
    return overlap_of(execute(graph, order, link))


def _run_ops(graph: Graph, arrived: Sequence[float]) -> list[Span]:
    """Runs ops in the order in which they become able to run; ties go by program order."""
    users: list[list[int]] = [[] for _ in graph.ops]
    missing = []
    for k, op in enumerate(graph.ops):
        inputs = {graph.op_position[name] for name in op.inputs}
        missing.append(len(inputs))
        for i in inputs:
            users[i].append(k)
    able_s = [
        max((arrived[graph.parameter_position[name]] for name in op.reads), default=0.0)
        for op in graph.ops
    ]
    # Events are ops that become able to run. In order of time, each op begins when its resource has
    # finished its earlier ops.
    able = [(able_s[k], k) for k in range(len(graph.ops)) if not missing[k]]
    heapq.heapify(able)
    free: dict[str, float] = {}
    spans = []
    while able:
        at_s, k = heapq.heappop(able)
        op = graph.ops[k]
        begin_s = max(at_s, free.get(op.resource, 0.0))
        end_s = free[op.resource] = begin_s + op.duration_s
        spans.append(Span(op.resource, op.name, begin_s, end_s))
        for user in users[k]:
            able_s[user] = max(able_s[user], end_s)
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(able, (able_s[user], user))
    return spans
