"""Baseline orders, which use no dependencies."""

from __future__ import annotations

import random

from hvd_order.base.link.link_model import LinkModel
from hvd_order.planning.graph.graph import Graph
from hvd_order.planning.graph.priorities import Priorities, ranked
from hvd_order.planning.steps.program import gradient_transfers

__all__ = ["arrival", "random_order"]


def arrival(graph: Graph, link: LinkModel) -> Priorities:
    """Order in which gradients become ready, as in DDP and Horovod.

    Parameters without gradient (only pulled) count as ready from the start, in the order of the
    graph.
    """
    del link
    ready = {transfer.name: transfer.release_s for transfer in gradient_transfers(graph)}
    return ranked({p.name: (ready.get(p.name, 0.0), i) for i, p in enumerate(graph.parameters)})


def random_order(graph: Graph, link: LinkModel, seed: int = 0) -> Priorities:
    """A random order by seed, like the unordered pulls of a parameter server."""
    del link
    names = [parameter.name for parameter in graph.parameters]
    random.Random(seed).shuffle(names)
    return {name: i for i, name in enumerate(names)}
