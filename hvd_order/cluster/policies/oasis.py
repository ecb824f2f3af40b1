"""OASiS: as PD-ORS, but workers and servers never share a machine.

Source: Bao, Peng, Wu, Li, "Online Job Scheduling in Distributed Machine Learning Clusters",
INFOCOM 2018, sections III and IV.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from hvd_order.base.errors import InvalidUsage
from hvd_order.cluster.model.machines import Amounts, Machines
from hvd_order.cluster.policies.auction import NOTHING, Auction
from hvd_order.cluster.policies.interface import JobState
from hvd_order.cluster.pricing.one_slot import Demand, OneSlot
from hvd_order.cluster.pricing.prices import Prices
from hvd_order.cluster.pricing.schedule import Offer

__all__ = ["Oasis"]


class Oasis(Auction):
    """The first machines hold workers, the others servers; each kind has prices of its own.

    Filling the cheapest machines is optimal here.

    Args:
        server_machines: how many of the machines hold servers.
        worker_prices, server_prices: of each kind of machine.
    """

    def __init__(
        self,
        machines: Machines,
        slots: int,
        worker_prices: Prices,
        server_prices: Prices,
        server_machines: int,
        quanta: int = 20,
    ) -> None:
        super().__init__(machines, slots, quanta)
        if not 0 <= server_machines < len(machines):
            raise InvalidUsage(f"{server_machines} of {len(machines)} machines for servers; one at "
                               "least must be left for workers")  # fmt: skip
        self._worker_prices, self._server_prices = worker_prices, server_prices
        self._for_servers = np.arange(len(machines)) >= len(machines) - server_machines

    def prices(self, used: Amounts) -> Amounts:
        """Prices in a slot, by machine and resource."""
        capacity = self._machines.capacity
        found: Amounts = np.where(
            self._for_servers[:, None],
            self._server_prices.of(used, capacity),
            self._worker_prices.of(used, capacity),
        )
        return found

    def offers(
        self,
        state: JobState,
        prices: Amounts,
        free: Amounts,
        needed: Mapping[bool, list[int | None]],
    ) -> list[Offer]:
        """The cheapest placement for each amount of work in a slot."""
        demand = Demand(state.worker, state.server, state.job.workers_per_server)
        slot = OneSlot(
            demand, prices, free, "greedy", np.random.default_rng(0),
            for_workers=~self._for_servers, for_servers=self._for_servers,
        )  # fmt: skip
        known: dict[int, Offer] = {}
        found: list[Offer] = [NOTHING]
        for workers in needed[False][1:]:
            if workers is None:
                found.append((math.inf, None))
                continue
            if workers not in known:
                known[workers] = slot.apart(workers)
            found.append(known[workers])
        return found
