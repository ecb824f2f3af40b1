"""What PD-ORS and OASiS have in common: a job is accepted for good when it arrives, if its worth
exceeds the price of the machines that it needs, and keeps the slots that it has paid for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from hvd_order.base.errors import InvalidUsage
from hvd_order.cluster.model.job import ClusterJob
from hvd_order.cluster.model.machines import Amounts, Machines
from hvd_order.cluster.policies.interface import JobState, PolicyDecision, View
from hvd_order.cluster.pricing.schedule import JobSchedule, Offer, best_schedule, workers_needed

__all__ = ["NOTHING", "Auction", "cheaper"]


class Auction(ABC):
    """Accepts or rejects each job when it arrives, and never looks back.

    A job that has not ended with its last slot, since a start or a resize took time, gets the
    cheapest schedule for the rest whatever it costs.

    Args:
        slots: of the whole run.
        quanta: equal parts of a job's work; a slot takes whole ones.
    """

    def __init__(self, machines: Machines, slots: int, quanta: int) -> None:
        if slots < 1 or quanta < 1:
            raise InvalidUsage(f"{slots} slots, work in {quanta} parts; expected at least one each")
        self._machines = machines
        self._slots = slots
        self._quanta = quanta
        self._used = np.zeros((slots, *machines.capacity.shape))
        self._accepted: dict[str, JobSchedule] = {}

    @property
    def used(self) -> NDArray[np.float64]:
        """Amounts that are sold, by slot, machine and resource."""
        return self._used

    @property
    def accepted(self) -> Mapping[str, JobSchedule]:
        """Schedules of jobs that were accepted and have not ended."""
        return self._accepted

    def quanta_of(self, job: ClusterJob) -> int:
        """Equal parts of a job's work."""
        return self._quanta

    @abstractmethod
    def prices(self, used: Amounts) -> Amounts:
        """Prices in a slot, by machine and resource."""

    @abstractmethod
    def offers(
        self,
        state: JobState,
        prices: Amounts,
        free: Amounts,
        needed: Mapping[bool, list[int | None]],
    ) -> list[Offer]:
        """The cheapest placement for each amount of work in a slot.

        Args:
            needed: workers for each amount, with all on one machine (True) or not.
        """

    def decide(self, view: View) -> PolicyDecision:
        """Sells slots to new jobs, and places all jobs as they have paid."""
        if view.slot_s is None:
            raise InvalidUsage("this policy sells slots; give the run a slot length")
        slot = round(view.now_s / view.slot_s)
        decision = PolicyDecision()
        for state in view.arrived:
            schedule = self._best(state, view, slot)
            if schedule is None or schedule.payoff <= 0:
                decision.reject.append(state.job.name)
            else:
                self._sell(state, schedule)
        refused = set(decision.reject)
        present = [s for s in (*view.waiting.values(), *view.running.values())
                   if s.job.name not in refused]  # fmt: skip
        for gone in self._accepted.keys() - {state.job.name for state in present}:
            del self._accepted[gone]
        for state in present:
            name = state.job.name
            schedule = self._accepted.get(name)
            if schedule is None or schedule.last < slot:
                schedule = self._best(state, view, slot)
                if schedule is not None:
                    self._sell(state, schedule)
            wanted = None if schedule is None else schedule.placements.get(slot)
            if wanted != state.placement:
                decision.place[name] = wanted
        return decision

    def best(self, state: JobState, view: View) -> JobSchedule | None:
        """The schedule with the largest payoff for a job at present prices; None: there is none."""
        return self._best(state, view, round(view.now_s / (view.slot_s or 1.0)))

    def _best(self, state: JobState, view: View, slot: int) -> JobSchedule | None:
        job, slot_s = state.job, view.slot_s or 0.0
        productive_s = slot_s - view.resize_s
        if productive_s <= 0:
            raise InvalidUsage(
                f"slots of {slot_s} s, and a resize takes {view.resize_s} s: no time is left"
            )
        quanta = self.quanta_of(job)
        needed = workers_needed(job, state.left(view.now_s), quanta, productive_s)
        # Slots in the same state are offered the same; most are still untouched.
        known: dict[bytes, list[Offer]] = {}

        def offers(at: int) -> list[Offer]:
            used = self._used[at]
            key = used.tobytes()
            if key not in known:
                free = np.maximum(self._machines.capacity - used, 0.0)
                known[key] = self.offers(state, self.prices(used), free, needed)
            return known[key]

        return best_schedule(
            lambda at: job.utility((at - slot) * slot_s),
            range(slot, self._slots),
            quanta,
            offers,
        )

    def _sell(self, state: JobState, schedule: JobSchedule) -> None:
        for at, placement in schedule.placements.items():
            machines = [part.machine for part in placement.parts]
            self._used[at, machines] += state.usage(placement)
        self._accepted[state.job.name] = schedule


NOTHING: Offer = (0.0, None)
"""No work in a slot costs nothing."""


def cheaper(first: Offer, second: Offer) -> Offer:
    """The first if they cost the same."""
    return first if first[0] <= second[0] * (1 + 1e-12) else second
