"""All heuristics by name. A new heuristic is a function and a line here."""

from __future__ import annotations

from collections.abc import Callable

from hvd_order.base.errors import InvalidUsage
from hvd_order.base.link.link_model import LinkModel
from hvd_order.planning.graph.graph import Graph
from hvd_order.planning.graph.priorities import Priorities
from hvd_order.planning.orders.baselines import arrival, random_order
from hvd_order.planning.orders.due_date import due_date
from hvd_order.planning.orders.merge import best_merge, mg_wfbp
from hvd_order.planning.orders.search import search
from hvd_order.planning.orders.slicing import PlannedSlice, p3, whole_tensors
from hvd_order.planning.orders.tac import tac
from hvd_order.planning.orders.tic import tic

__all__ = ["ORDERS", "SLICINGS", "order", "slices"]

ORDERS: dict[str, Callable[[Graph, LinkModel], Priorities]] = {
    "arrival": arrival,
    "due_date": due_date,
    "random": random_order,
    "search": search,
    "tac": tac,
    "tic": tic,
}
"""Heuristics for the order of transfers."""

SLICINGS: dict[str, Callable[[Graph, LinkModel, Priorities], list[PlannedSlice]]] = {
    "best_merge": best_merge,
    "mg_wfbp": mg_wfbp,
    "p3": p3,
    "whole": whole_tensors,
}
"""Heuristics for the slices that travel together."""


def order(name: str, graph: Graph, link: LinkModel) -> Priorities:
    """Priorities of all parameters by the named heuristic.

    Raises:
        InvalidUsage: there is none.
    """
    if name not in ORDERS:
        raise InvalidUsage(f"no order is called {name!r}; there are: {', '.join(ORDERS)}")
    return ORDERS[name](graph, link)


def slices(name: str, graph: Graph, link: LinkModel, priorities: Priorities) -> list[PlannedSlice]:
    """Slices of all gradients by the named rule.

    Raises:
        InvalidUsage: there is none.
    """
    if name not in SLICINGS:
        raise InvalidUsage(f"no slicing is called {name!r}; there are: {', '.join(SLICINGS)}")
    return SLICINGS[name](graph, link, priorities)
