"""All policies by name. A new policy is a file with one class, and a line here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hvd_order.cluster.model.job import Job
from hvd_order.cluster.model.machines import Machines
from hvd_order.cluster.policies.dorm import Dorm
from hvd_order.cluster.policies.drf import Drf
from hvd_order.cluster.policies.fifo import Fifo
from hvd_order.cluster.policies.finish_time import FinishTime
from hvd_order.cluster.policies.interface import Policy
from hvd_order.cluster.policies.ones import Ones
from hvd_order.cluster.policies.optimus import Optimus
from hvd_order.cluster.policies.srtf import Srtf
from hvd_order.cluster.policies.tiresias import Tiresias
from hvd_order.errors import InvalidUsage

__all__ = ["POLICIES", "Known", "policy"]


@dataclass(frozen=True)
class Known:
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
    examples: Sequence[Job]
    seed: int = 0


POLICIES: dict[str, Callable[[Known], Policy]] = {
    "fifo": lambda _: Fifo(),
    "srtf": lambda _: Srtf(),
    "drf": lambda _: Drf(),
    "dorm": lambda _: Dorm(),
    "optimus": lambda _: Optimus(),
    "tiresias": lambda _: Tiresias(),
    "finish-time": lambda _: FinishTime(),
    "ones": lambda known: Ones(known.seed),
}
"""Makes a policy for one run."""


def policy(name: str, known: Known) -> Policy:
    """The named policy, for one run.

    Raises:
        InvalidUsage: there is none, or it cannot work in such a run.
    """
    if name not in POLICIES:
        raise InvalidUsage(f"no policy is called {name!r}; there are: {', '.join(POLICIES)}")
    return POLICIES[name](known)
