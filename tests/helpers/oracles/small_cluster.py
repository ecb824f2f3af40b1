"""Small random instances of a cluster, and what must hold of PD-ORS on them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from helpers.oracles.offline_optimum import offline_optimum

from hvd_order.cluster.model.job import ClusterJob
from hvd_order.cluster.model.machines import Amounts, Machine, Machines
from hvd_order.cluster.model.speed import LocalitySpeed
from hvd_order.cluster.model.utility import Steps
from hvd_order.cluster.policies.interface import JobState, View
from hvd_order.cluster.policies.pd_ors import PdOrs
from hvd_order.cluster.pricing.prices import limits_for
from hvd_order.cluster.pricing.schedule import JobSchedule, Offer
from hvd_order.cluster.simulate.outcome import JobOutcome
from hvd_order.cluster.simulate.simulator import Rules, simulate

__all__ = ["compare_with_optimum", "small_instance", "speed"]


def speed(inside_s: float, outside_s: float) -> LocalitySpeed:
    """Worker-slots of a unit of work, on one machine and on several."""
    return LocalitySpeed(inside_s, outside_s - inside_s, math.inf, 1.0)


def small_instance(seed: int) -> tuple[Machines, list[ClusterJob], int]:
    """Two or three machines, up to five jobs, three to five slots."""
    random = np.random.default_rng(seed)
    machines = Machines(
        [Machine(f"m{i}", {"gpu": int(random.integers(2, 5)), "cpu": int(random.integers(4, 9))})
         for i in range(random.integers(2, 4))]
    )  # fmt: skip
    slots = int(random.integers(3, 6))
    jobs = []
    for i in range(int(random.integers(2, 6))):
        inside = float(random.uniform(0.3, 0.8))
        worth = np.sort(random.uniform(1, 20, slots))[::-1]
        jobs.append(
            ClusterJob(
                f"j{i}", float(random.integers(0, slots - 1)), 4.0,
                speed(inside, inside * float(random.uniform(1.0, 2.5))),
                {"gpu": 1, "cpu": int(random.integers(1, 3))}, {"cpu": int(random.integers(1, 3))},
                workers_per_server=int(random.integers(1, 4)), requested=1, most=6, batch=6,
                utility=Steps([float(w) for w in worth]),
            )
        )  # fmt: skip
    return machines, sorted(jobs, key=lambda one: one.arrival_s), slots


class Recorder(PdOrs):
    """Keeps the largest payoff of each job without regard to what is sold: the dual variable."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.duals: dict[str, float] = {}
        self.planned = 0.0  # worth, of the slots in which schedules end
        self._whole = False

    def _best(self, state: JobState, view: View, slot: int) -> JobSchedule | None:
        if state.job.name not in self.duals:
            self._whole = True
            best = super()._best(state, view, slot)
            self._whole = False
            self.duals[state.job.name] = max(best.payoff, 0.0) if best is not None else 0.0
        return super()._best(state, view, slot)

    def _sell(self, state: JobState, schedule: JobSchedule) -> None:
        before = np.stack([self.prices(used) for used in self.used])
        super()._sell(state, schedule)
        self.planned += schedule.payoff + schedule.cost
        assert (np.stack([self.prices(used) for used in self.used]) >= before).all()

    def offers(
        self,
        state: JobState,
        prices: Amounts,
        free: Amounts,
        needed: Mapping[bool, list[int | None]],
    ) -> list[Offer]:
        return super().offers(
            state, prices, self._machines.capacity if self._whole else free, needed
        )


def compare_with_optimum(seed: int) -> float:
    """Checks what must hold of an instance.

    Returns:
        The planned worth of PD-ORS over the optimum; 1 if neither is worth anything.
    """
    machines, jobs, slots = small_instance(seed)
    limits = limits_for(jobs, machines, 1.0, slots)
    policy = Recorder(machines, slots, limits, 4, "exact")
    accepted: list[JobOutcome] = []
    rules = Rules(slot_s=1.0, until_s=float(slots))
    simulate(jobs, machines, policy, rules, ended=accepted.append)
    assert (policy.used <= machines.capacity + 1e-9).all()
    assert all(outcome.ended_s is not None for outcome in accepted if not outcome.rejected)
    # Workers are whole, so a job may end before its schedule says; never after it.
    worth = policy.planned
    assert sum(outcome.utility for outcome in accepted) >= worth - 1e-6
    best = offline_optimum(jobs, machines, slots, 4)
    prices = np.stack([policy.prices(used) for used in policy.used])
    dual = sum(policy.duals.values()) + float((prices * machines.capacity).sum())
    assert dual >= best - 1e-6
    assert worth * limits.ratio >= best - 1e-6
    assert worth <= best + 1e-6
    return worth / best if best > 1e-9 else 1.0
