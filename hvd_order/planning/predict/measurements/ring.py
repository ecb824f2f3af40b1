"""Time of an all-reduce step when the workers of a node share its link."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_order.planning.predict.workers.closed_forms import Pollux

__all__ = ["Ring"]


@dataclass(frozen=True)
class Ring(Pollux):
    """Seconds a step of an all-reduce job: (T_grad^g + T_sync^g)^(1/g), as Pollux' formula.

    T_grad = ac + bc m for a batch of m a worker. T_sync is 0 for one worker, else
    ``alpha + beta (k - 1) / n`` for k workers on n nodes: each of the k / n workers of a node sends
    (k - 1) / k of the gradients, up to a factor, and they share the node's link. alpha and beta are
    al and bl on one node, an and bn on several.

    The form of T_grad and of the sum are those of Qiao et al., "Pollux", OSDI 2021, section 3.2;
    the volume of a ring is Patarasuk and Yuan's (Journal of Parallel and Distributed Computing
    69(2), 2009). That workers share the link is this project's term: with Pollux' linear term, a
    fit to two nodes misses three and four by twice as much
    (benchmarks/planning/prediction/public.py).
    """

    @staticmethod
    def spread(workers: int, nodes: int) -> float:
        """The factor of beta in T_sync."""
        return (workers - 1) / nodes
