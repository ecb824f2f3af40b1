"""All policies by name. A new policy is a file with one class, and a line here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hvd_order.base.errors import InvalidUsage
from hvd_order.cluster.model.job import ClusterJob
from hvd_order.cluster.model.machines import Machines
from hvd_order.cluster.policies.dorm import Dorm
from hvd_order.cluster.policies.drf import Drf
from hvd_order.cluster.policies.fifo import Fifo
from hvd_order.cluster.policies.finish_time import FinishTime
from hvd_order.cluster.policies.interface import ClusterPolicy
from hvd_order.cluster.policies.oasis import Oasis
from hvd_order.cluster.policies.ones import Ones
from hvd_order.cluster.policies.optimus import Optimus
from hvd_order.cluster.policies.pd_ors import PdOrs
from hvd_order.cluster.policies.srtf import Srtf
from hvd_order.cluster.policies.tiresias import Tiresias
from hvd_order.cluster.pricing.one_slot import Solver
from hvd_order.cluster.pricing.prices import limits_for

__all__ = ["POLICIES", "RANDOM", "PolicyInputs", "policy"]


@dataclass(frozen=True)
class PolicyInputs:
    """What a policy may know before the first job arrives.

    Attributes:
        slot_s: length of a slot; None: no slots.
        until_s: when the run ends; infinity: with the last job.
        examples: jobs such as will arrive, for policies that need to know how much jobs take and
            are worth. Nobody may look for a job's own future in it.
        seed: of random choices.
    """

    machines: Machines
    slot_s: float | None
    until_s: float
    examples: Sequence[ClusterJob]
    seed: int = 0


def _slots(known: PolicyInputs) -> tuple[float, int]:
    """Length and number of the slots.

    Raises:
        InvalidUsage: the run has none, or no end.
    """
    if known.slot_s is None or not math.isfinite(known.until_s):
        raise InvalidUsage(
            "it sells slots of a run with an end: give a slot length and an end of the run "
            "(--slot, --until)"
        )
    return known.slot_s, math.ceil(known.until_s / known.slot_s - 1e-9)


def _pd_ors(known: PolicyInputs, solver: Solver) -> ClusterPolicy:
    slot_s, slots = _slots(known)
    prices = limits_for(known.examples, known.machines, slot_s, slots)
    return PdOrs(known.machines, slots, prices, solver=solver, seed=known.seed)


def _oasis(known: PolicyInputs) -> ClusterPolicy:
    """Half of the machines hold servers, as in the paper's evaluation; none if no job has any."""
    slot_s, slots = _slots(known)
    machines = known.machines
    serve = any(job.workers_per_server is not None for job in known.examples)
    if serve and len(machines) < 2:
        raise InvalidUsage(
            "oasis keeps workers and servers apart; at least two machines are needed"
        )
    server_machines = len(machines) // 2 if serve else 0
    for_servers = np.arange(len(machines)) >= len(machines) - server_machines
    worker_prices = server_prices = limits_for(
        known.examples, machines, slot_s, slots, 0.25, servers=False, of=~for_servers
    )
    if serve:
        server_prices = limits_for(
            known.examples, machines, slot_s, slots, 0.25, workers=False, of=for_servers
        )
    return Oasis(machines, slots, worker_prices, server_prices, server_machines)


POLICIES: dict[str, Callable[[PolicyInputs], ClusterPolicy]] = {
    "fifo": lambda _: Fifo(),
    "srtf": lambda _: Srtf(),
    "drf": lambda _: Drf(),
    "dorm": lambda _: Dorm(),
    "optimus": lambda _: Optimus(),
    "tiresias": lambda _: Tiresias(),
    "finish-time": lambda _: FinishTime(),
    "ones": lambda known: Ones(known.seed),
    "oasis": _oasis,
    "pd-ors": lambda known: _pd_ors(known, "rounding"),
    "pd-ors-exact": lambda known: _pd_ors(known, "exact"),
    "pd-ors-greedy": lambda known: _pd_ors(known, "greedy"),
}
"""Makes a policy for one run."""

RANDOM = frozenset({"ones", "pd-ors"})
"""Names of those that draw: another ``PolicyInputs.seed`` may give another result."""


def policy(name: str, known: PolicyInputs) -> ClusterPolicy:
    """The named policy, for one run.

    Raises:
        InvalidUsage: there is none, or it cannot work in such a run.
    """
    if name not in POLICIES:
        raise InvalidUsage(f"no policy is called {name!r}; there are: {', '.join(POLICIES)}")
    try:
        return POLICIES[name](known)
    except InvalidUsage as error:
        raise InvalidUsage(f"policy {name}: {error}") from None
