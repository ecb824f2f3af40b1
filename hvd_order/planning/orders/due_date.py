"""Earliest due date: the gradient that the next forward pass reads first goes first.

One machine (the link), jobs (gradients) with release times in the backward pass and due dates in
the next forward pass, preemption (slices): earliest due date first is optimal for the maximum
lateness, and on a chain of ops for the step time. docs/theory.md has the proof, and what
slices and latency add.
"""

from __future__ import annotations

import math

from hvd_order.base.link.link_model import LinkModel
from hvd_order.planning.graph.graph import Graph
from hvd_order.planning.graph.priorities import Priorities, ranked
from hvd_order.planning.steps.program import first_uses, unhindered

__all__ = ["due_date"]


def due_date(graph: Graph, link: LinkModel) -> Priorities:
    """Orders parameters by the time at which their first reader starts if no op waits.

    Parameters with the same first reader share a priority. A parameter that no op reads is due when
    its gradient is next computed.

    Args:
        link: unused: a latency shifts all due dates equally, and the cost of a slice does not
            change which gradient is due first.

    Source:
        Horn, "Some simple scheduling algorithms", Naval Research Logistics 21, 1974.
    """
    del link
    times = unhindered(graph)
    never = (math.inf, len(graph.ops))
    due = {
        parameter.name: never if first is None else (times[first][0], first)
        for parameter, first in zip(graph.parameters, first_uses(graph), strict=True)
    }
    return ranked(due)
