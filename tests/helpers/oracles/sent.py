"""Orders as tests judge them: how late gradients are, and what a channel of pulls may send."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from hvd_order.base.link.link_model import LinkModel
from hvd_order.planning.graph.graph import Graph
from hvd_order.planning.graph.priorities import Priorities
from hvd_order.planning.steps.delivery import GradientDelivery, LinkQueue, piece_times
from hvd_order.planning.steps.program import gradient_transfers

__all__ = ["deliver", "max_lateness_s", "pull_order"]


def deliver(
    transfers: Sequence[GradientDelivery],
    priorities: Priorities,
    link: LinkModel,
    slice_bytes: int | None = None,
) -> dict[str, float]:
    """Arrival time of each transfer, by name, on the clock of its release.

    Args:
        slice_bytes: slice size; each slice has its cost, and the last slice of a transfer has the
            latency. None: the fluid ideal, bytes alone.
    """
    queue = LinkQueue(fluid=slice_bytes is None)
    for each in sorted(transfers, key=lambda transfer: transfer.release_s):
        pieces = piece_times(each.size_bytes, link, slice_bytes)
        queue.add(each.name, (priorities[each.name],), each.release_s, pieces)
    latency_s = 0.0 if slice_bytes is None else link.latency_s
    return {each.name: queue.end_s(each.name) + latency_s for each in transfers}


def max_lateness_s(
    graph: Graph, priorities: Priorities, link: LinkModel, slice_bytes: int | None = None
) -> float:
    """Lateness of the latest gradient if no op waits for any; negative if all are early.

    Args:
        slice_bytes: as in :func:`deliver`.
    """
    transfers = gradient_transfers(graph)
    arrived = deliver(transfers, priorities, link, slice_bytes)
    return max((arrived[each.name] - each.due_s for each in transfers), default=0.0)


def pull_order(graph: Graph, priorities: Mapping[str, int], pick: random.Random) -> list[int]:
    """An order in which the channel may send the parameters, by position.

    Args:
        priorities: priorities by parameter; parameters without priority may go at any time.
    """
    free = [i for i, p in enumerate(graph.parameters) if p.name not in priorities]
    ranked = [(priorities[p.name], i) for i, p in enumerate(graph.parameters) if i not in free]
    order = []
    while free or ranked:
        lowest = min(ranked)[0] if ranked else 0
        first = pick.choice([*free, *(i for priority, i in ranked if priority == lowest)])
        order.append(first)
        free = [i for i in free if i != first]
        ranked = [(priority, i) for priority, i in ranked if i != first]
    return order
