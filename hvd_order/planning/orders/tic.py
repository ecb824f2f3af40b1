"""TIC: timing-independent communication order."""

from __future__ import annotations

from hvd_order.base.link.link_model import LinkModel
from hvd_order.planning.graph.graph import Graph
from hvd_order.planning.graph.priorities import Priorities, ranked
from hvd_order.planning.graph.properties import impending

__all__ = ["tic"]


def tic(graph: Graph, link: LinkModel) -> Priorities:
    """Orders transfers by M+ where every transfer takes 1 and every op 0: by the least number of
    transfers that unblocks an op which needs this transfer and others.

    In a chain the first two transfers are tied. A parameter whose readers need no other parameter
    comes last, regardless of the work that it unlocks.

    Args:
        link: unused; all heuristics share one signature.

    Source:
        TicTac (MLSys 2019), section 4.2; numbers are those of the authors' ``tictac/tic.py``.
    """
    del link
    needs = {mask for mask in graph.needs if mask.bit_count() > 1}
    count = len(graph.parameters)
    least = impending(((mask.bit_count(), mask) for mask in needs), (1 << count) - 1, count)
    return ranked({p.name: least[i] for i, p in enumerate(graph.parameters)})
