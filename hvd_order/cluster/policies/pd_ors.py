"""PD-ORS: exponential prices, a dynamic programme over slots, jobs on one machine or on several.

Source: Yu, Liu, Wu, Ji, Bentley, "Toward Efficient Online Scheduling for Distributed Machine
Learning Systems", IEEE TNSE 9(4), 2022. Its text was not read: prices, payoff and dynamic programme
follow OASiS, its parent (oasis.py); the two cases of locality and the rounding are reconstructed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from hvd_order.cluster.model.machines import Amounts, Machines
from hvd_order.cluster.policies.auction import NOTHING, Auction, cheaper
from hvd_order.cluster.policies.interface import JobState
from hvd_order.cluster.pricing.one_slot import Demand, OneSlot, Solver
from hvd_order.cluster.pricing.prices import Prices
from hvd_order.cluster.pricing.schedule import Offer

__all__ = ["PdOrs"]


class PdOrs(Auction):
    """Prices, and in each slot the cheaper of one machine and several.

    Args:
        solver: of placements over several machines: "rounding" (the paper's), "exact" (an integer
            programme), "greedy".
    """

    def __init__(
        self,
        machines: Machines,
        slots: int,
        prices: Prices,
        quanta: int = 20,
        solver: Solver = "rounding",
        seed: int = 0,
    ) -> None:
        super().__init__(machines, slots, quanta)
        self._prices = prices
        self._solver = solver
        self._random = np.random.default_rng(seed)

    def prices(self, used: Amounts) -> Amounts:
        """Prices in a slot, by machine and resource."""
        return self._prices.of(used, self._machines.capacity)

    def offers(
        self,
        state: JobState,
        prices: Amounts,
        free: Amounts,
        needed: Mapping[bool, list[int | None]],
    ) -> list[Offer]:
        """The cheapest placement for each amount of work in a slot."""
        demand = Demand(state.worker, state.server, state.job.workers_per_server)
        slot = OneSlot(demand, prices, free, self._solver, self._random)
        found: list[Offer] = [NOTHING]
        known: dict[tuple[int | None, int | None], Offer] = {}
        for inside, outside in zip(needed[True][1:], needed[False][1:], strict=True):
            key = (inside, outside)
            if key not in known:
                offer: Offer = (math.inf, None)
                if inside is not None:
                    offer = slot.together(inside)
                if outside is not None:
                    offer = cheaper(offer, slot.apart(outside, below=offer[0]))
                known[key] = offer
            found.append(known[key])
        return found
