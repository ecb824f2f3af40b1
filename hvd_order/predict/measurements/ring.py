"""Time of an all-reduce step when the workers of a node share its link."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hvd_order.errors import InvalidUsage
from hvd_order.predict.workers.fit import least_squares

__all__ = ["Ring", "fit_ring"]

_GAMMAS = [1 + i / 4 for i in range(37)]  # as Pollux: 1 to 10


@dataclass(frozen=True)
class Ring:
    """Seconds a step of an all-reduce job: (T_grad^g + T_sync^g)^(1/g), as Pollux' formula.

    T_grad = ac + bc m for a batch of m a worker. T_sync is 0 for one worker, else
    ``alpha + beta (k - 1) / n`` for k workers on n nodes: each of the k / n workers of a node sends
    (k - 1) / k of the gradients, up to a factor, and they share the node's link. alpha and beta are
    al and bl on one node, an and bn on several.

    The form of T_grad and of the sum are those of Qiao et al., "Pollux", OSDI 2021, section 3.2;
    the volume of a ring is Patarasuk and Yuan's (Journal of Parallel and Distributed Computing
    69(2), 2009). That workers share the link is this project's term: with Pollux' linear term, a
    fit to two nodes misses three and four by twice as much (benchmarks/prediction/public.py).
    """

    ac: float
    bc: float
    an: float
    bn: float
    gamma: float
    al: float = 0.0
    bl: float = 0.0

    def step_s(self, batch: float, workers: int, nodes: int) -> float:
        """Time of a step."""
        gradient_s = self.ac + self.bc * batch
        if workers == 1:
            return gradient_s
        alpha, beta = (self.al, self.bl) if nodes == 1 else (self.an, self.bn)
        sync_s = alpha + beta * (workers - 1) / nodes
        return float((gradient_s**self.gamma + sync_s**self.gamma) ** (1 / self.gamma))


def fit_ring(measured: Sequence[tuple[float, int, int, float]]) -> Ring:
    """Fits (batch a worker, workers, nodes, seconds a step).

    One worker's steps give ac and bc. The rest is fitted for each of some gammas; the one with the
    least squares of relative errors stays. What nothing was measured of (several workers on one
    node, or several nodes) costs nothing.

    Raises:
        InvalidUsage: no measurement of one worker.
    """
    alone = [(batch, step_s) for batch, workers, _, step_s in measured if workers == 1]
    if not alone:
        raise InvalidUsage("no measurement of one worker, which the formula begins with")
    ac, bc = least_squares([[1.0, batch] for batch, _ in alone], [s for _, s in alone])
    best, least = Ring(ac, bc, 0.0, 0.0, 1.0), math.inf
    for gamma in _GAMMAS:
        sync = {True: (0.0, 0.0), False: (0.0, 0.0)}
        for one_node in sync:
            rows, targets = [], []
            for batch, workers, nodes, step_s in measured:
                rest = step_s**gamma - (ac + bc * batch) ** gamma
                if workers > 1 and (nodes == 1) == one_node and rest > 0:
                    rows.append([1.0, (workers - 1) / nodes])
                    targets.append(rest ** (1 / gamma))
            if rows:
                alpha, beta = least_squares(rows, targets)
                sync[one_node] = (alpha, beta)
        tried = Ring(ac, bc, *sync[False], gamma, *sync[True])
        error = sum(
            (tried.step_s(batch, workers, nodes) / step_s - 1) ** 2
            for batch, workers, nodes, step_s in measured
        )
        if error < least:
            best, least = tried, error
    return best
