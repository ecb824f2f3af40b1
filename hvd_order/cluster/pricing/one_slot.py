"""The cheapest placement of a job in one slot: theta(t, v) of PD-ORS.

All workers and servers on one machine, where transfers cross no network, or on several: a mixed
packing and covering problem, solved by randomised rounding of its linear relaxation, exactly as an
integer programme, or greedily.

Source: Yu et al. (PD-ORS), IEEE TNSE 9(4), 2022, as reconstructed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hvd_order.cluster.model.machines import Amounts
from hvd_order.cluster.model.placement import JobPlacement

__all__ = ["Demand", "OneSlot", "Solver", "round_randomly"]

Solver = Literal["rounding", "exact", "greedy"]

_TRIES = 64
_CLOSE = 1e-9


@dataclass(frozen=True)
class Demand:
    """What a job takes: rows of a worker and of a server, and workers for each server."""

    worker: Amounts
    server: Amounts
    workers_per_server: int | None

    def servers_for(self, workers: int) -> int:
        """Fewest servers for the workers."""
        return 0 if self.workers_per_server is None else -(-workers // self.workers_per_server)


class OneSlot:
    """Placements of one job in one slot.

    Args:
        prices, free: by machine and resource.
        for_workers, for_servers: machines that may hold them, by their places; None: all.
    """

    def __init__(
        self,
        demand: Demand,
        prices: Amounts,
        free: Amounts,
        solver: Solver,
        random: np.random.Generator,
        for_workers: NDArray[np.bool_] | None = None,
        for_servers: NDArray[np.bool_] | None = None,
    ) -> None:
        self._demand = demand
        self._free = free
        self._solver = solver
        self._random = random
        self._worker_price = prices @ demand.worker
        self._server_price = prices @ demand.server
        self._allowed = (for_workers, for_servers)
        self._worker_room = self._room(0, free)
        self._server_room = self._room(1, free)

    def together(self, workers: int) -> tuple[float, JobPlacement | None]:
        """The cheapest machine that holds all; the first of equal ones. (inf, None): none does."""
        servers = self._demand.servers_for(workers)
        whole = workers * self._demand.worker + servers * self._demand.server
        fits = (self._free >= whole - _CLOSE).all(axis=1)
        if not fits.any():
            return math.inf, None
        costs = workers * self._worker_price + servers * self._server_price
        machine = int(np.where(fits, costs, math.inf).argmin())
        return float(costs[machine]), JobPlacement.of([(machine, workers, servers)])

    def apart(self, workers: int, below: float = math.inf) -> tuple[float, JobPlacement | None]:
        """The cheapest placement over machines that the solver finds.

        Args:
            below: a cost that is not worth reaching: (inf, None) if none can be below it.
        """
        servers = self._demand.servers_for(workers)
        if self._worker_room.sum() < workers or self._server_room.sum() < servers:
            return math.inf, None
        least = workers * self._worker_price.min()
        if servers:
            least += self._server_price.min() * workers / (self._demand.workers_per_server or 1)
        if least >= below:
            return math.inf, None
        best = self._greedily(workers, servers)
        if self._solver != "greedy" and best[0] > least * (1 + _CLOSE):
            exact = self._solver == "exact"
            solution = _solve(self, workers, integers=exact)
            if solution is not None:
                found = (
                    self._rounded(solution, workers) if not exact else self._of(np.rint(solution))
                )
                best = min(best, found, key=lambda one: one[0])
        return best if best[0] < below else (math.inf, None)

    def _room(self, kind: int, free: Amounts) -> NDArray[np.int64]:
        """How many workers (kind 0) or servers (1) fit on each machine by themselves."""
        demand = (self._demand.worker, self._demand.server)[kind]
        allowed = self._allowed[kind]
        needed = demand > 0
        if needed.any():
            counts = np.floor((free[:, needed] / demand[needed]).min(axis=1) + _CLOSE)
        else:
            counts = np.full(len(free), 1e9)
        room: NDArray[np.int64] = counts.astype(np.int64)
        return room if allowed is None else np.where(allowed, room, 0)

    def _greedily(self, workers: int, servers: int) -> tuple[float, JobPlacement | None]:
        """Fills the cheapest machines with workers, then the cheapest of what is left with servers.

        Servers that find no room push workers away: with a machine's worth of them set aside first.
        """
        best: tuple[float, JobPlacement | None] = (math.inf, None)
        for servers_first in (False, True):
            counts = np.zeros((2, len(self._free)), dtype=np.int64)
            free = self._free
            for kind in (1, 0) if servers_first else (0, 1):
                to_go = (workers, servers)[kind]
                if to_go == 0:
                    continue
                price = (self._worker_price, self._server_price)[kind]
                room = self._room(kind, free)
                order = np.argsort(price, kind="stable")
                filled = np.minimum(np.cumsum(room[order]), to_go)
                counts[kind][order] = np.diff(filled, prepend=0)
                if filled[-1] < to_go:
                    counts[kind][0] = -1
                    break
                demand = (self._demand.worker, self._demand.server)[kind]
                free = free - counts[kind][:, None] * demand
            if (counts < 0).any():
                continue
            cost = float(counts[0] @ self._worker_price + counts[1] @ self._server_price)
            if cost < best[0]:
                best = (cost, _placement(counts))
            if servers == 0:
                break
        return best

    def _rounded(
        self, solution: NDArray[np.float64], workers: int
    ) -> tuple[float, JobPlacement | None]:
        """The cheapest of several roundings that is feasible."""
        used = np.flatnonzero(solution > _CLOSE)
        machines = len(self._free)
        tries = round_randomly(solution[used], _TRIES, self._random)
        of_server = used >= machines
        worker_sum = tries[:, ~of_server].sum(axis=1)
        servers = tries[:, of_server].sum(axis=1)
        fine = worker_sum >= workers
        if self._demand.workers_per_server is not None:
            fine &= servers * self._demand.workers_per_server >= worker_sum
        price = np.concatenate([self._worker_price, self._server_price])[used]
        costs = tries @ price
        for i in np.argsort(np.where(fine, costs, math.inf), kind="stable"):
            if not fine[i]:
                break
            whole = np.zeros(2 * machines, dtype=np.int64)
            whole[used] = tries[i]
            counts = whole.reshape(2, machines)
            usage = counts.T @ np.stack([self._demand.worker, self._demand.server])
            if (usage <= self._free + _CLOSE).all():
                return float(costs[i]), _placement(counts)
        return math.inf, None

    def _of(self, solution: NDArray[np.float64]) -> tuple[float, JobPlacement | None]:
        counts = solution.astype(np.int64).reshape(2, len(self._free))
        cost = float(counts[0] @ self._worker_price + counts[1] @ self._server_price)
        return cost, _placement(counts)


def _solve(slot: OneSlot, workers: int, *, integers: bool) -> NDArray[np.float64] | None:
    """Workers, then servers, by machine: the least cost of the relaxation, or of integers."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array, hstack, identity, vstack

    demand, free = slot._demand, slot._free
    machines, per_server = len(free), demand.workers_per_server
    ones, zeros = np.ones((1, machines)), np.zeros((1, machines))
    rows = [csr_array(np.hstack([ones, zeros]))]
    low, high = [float(workers)], [math.inf]
    if per_server is not None:
        rows.append(csr_array(np.hstack([-ones, per_server * ones])))
        low.append(0.0)
        high.append(math.inf)
    each = identity(machines, format="csr")
    for resource in np.flatnonzero((demand.worker > 0) | (demand.server > 0)):
        rows.append(hstack([demand.worker[resource] * each, demand.server[resource] * each]))
        low += [-math.inf] * machines
        high += list(free[:, resource])
    most = np.minimum(np.concatenate([slot._worker_room, slot._server_room]), workers)
    if per_server is None:
        most[machines:] = 0
    found = milp(
        np.concatenate([slot._worker_price, slot._server_price]),
        constraints=LinearConstraint(vstack(rows, format="csr"), low, high),
        bounds=Bounds(0, most),
        integrality=np.full(2 * machines, int(integers)),
        options={"mip_rel_gap": 0.0},
    )
    solution: NDArray[np.float64] | None = found.x
    return solution


def round_randomly(
    fractional: NDArray[np.float64], tries: int, random: np.random.Generator
) -> NDArray[np.int64]:
    """Rounds numbers up or down by chance, a row for each try; the mean of each is the number."""
    # What the solver left of an integer is not rounded up by chance.
    floor = np.floor(fractional + 1e-9)
    part = np.maximum(fractional - floor, 0.0)
    up: NDArray[np.bool_] = random.random((tries, len(fractional))) < part
    return (floor + up).astype(np.int64)


def _placement(counts: NDArray[np.int64]) -> JobPlacement:
    used = np.flatnonzero(counts.any(axis=0))
    return JobPlacement.of((int(m), int(counts[0, m]), int(counts[1, m])) for m in used)
