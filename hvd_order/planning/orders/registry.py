"""All heuristics by name. A new heuristic is a function and a line here."""

from __future__ import annotations

from collections.abc import Callable

from hvd_order.base.errors import InvalidUsage
from hvd_order.base.link.link_model import LinkModel
from hvd_order.planning.graph.graph import Graph
from hvd_order.planning.graph.priorities import Priorities
from hvd_order.planning.orders.baselines import arrival, random_order
from hvd_order.planning.orders.due_date import due_date
from hvd_order.planning.orders.search import search
from hvd_order.planning.orders.tac import tac
from hvd_order.planning.orders.tic import tic

__all__ = ["ORDERS", "order"]

ORDERS: dict[str, Callable[[Graph, LinkModel], Priorities]] = {
    "arrival": arrival,
    "due_date": due_date,
    "random": random_order,
    "search": search,
    "tac": tac,
    "tic": tic,
}
"""Heuristics for the order of transfers."""


def order(name: str, graph: Graph, link: LinkModel) -> Priorities:
    """Priorities of all parameters by the named heuristic.

    Raises:
        InvalidUsage: there is none.
    """
    if name not in ORDERS:
        raise InvalidUsage(f"no order is called {name!r}; there are: {', '.join(ORDERS)}")
    return ORDERS[name](graph, link)
