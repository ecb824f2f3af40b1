"""The machines of a cluster."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hvd_order.base.errors import InvalidUsage

__all__ = ["Amounts", "Machine", "Machines"]

Amounts = NDArray[np.float64]
"""Amounts of resources, in the order of ``Machines.resources``; of several machines a row each."""


@dataclass(frozen=True)
class Machine:
    """One machine.

    Attributes:
        capacity: amount of each resource, such as ``{"gpu": 8, "cpu": 64}``.
        bytes_per_s: of its network link, each way, as payload gets it.
    """

    name: str
    capacity: Mapping[str, float]
    bytes_per_s: float = math.inf


@dataclass(frozen=True)
class Machines:
    """All machines; their numbers are places in ``machines``.

    Raises:
        InvalidUsage: no machine, two of one name, or an amount that is negative or not finite.
    """

    machines: Sequence[Machine]
    resources: tuple[str, ...] = field(init=False)
    capacity: Amounts = field(init=False, compare=False)

    def __post_init__(self) -> None:
        if not self.machines:
            raise InvalidUsage("a cluster without machines; at least one is needed")
        names = [machine.name for machine in self.machines]
        twice = (
            {name for name in names if names.count(name) > 1}
            if len(set(names)) < len(names)
            else ()
        )
        if twice:
            raise InvalidUsage(f"two machines are called {min(twice)!r}")
        for machine in self.machines:
            for resource, amount in machine.capacity.items():
                if not 0 <= amount < math.inf:
                    raise InvalidUsage(f"machine {machine.name!r} has {amount} of {resource!r}; "
                                       "expected a number of at least 0")  # fmt: skip
            if not machine.bytes_per_s > 0:
                raise InvalidUsage(
                    f"the link of machine {machine.name!r} has {machine.bytes_per_s} bytes/s; "
                    "expected more than 0"
                )
        found = dict.fromkeys(name for machine in self.machines for name in machine.capacity)
        object.__setattr__(self, "resources", tuple(found))
        rows = [[machine.capacity.get(name, 0.0) for name in found] for machine in self.machines]
        capacity = np.array(rows, dtype=np.float64)
        capacity.flags.writeable = False
        object.__setattr__(self, "capacity", capacity)

    def __len__(self) -> int:
        return len(self.machines)

    @classmethod
    def alike(
        cls, count: int, capacity: Mapping[str, float], bytes_per_s: float = math.inf
    ) -> Machines:
        """``count`` equal machines, called m0, m1, ..."""
        return cls([Machine(f"m{i}", dict(capacity), bytes_per_s) for i in range(count)])

    def amounts(self, demand: Mapping[str, float]) -> Amounts:
        """A demand as a row.

        Raises:
            InvalidUsage: no machine has such a resource, or an amount is negative.
        """
        for resource, amount in demand.items():
            if amount < 0 or (amount > 0 and resource not in self.resources):
                raise InvalidUsage(f"a demand of {amount} of {resource!r}; the machines have "
                                   f"{', '.join(self.resources)}")  # fmt: skip
        return np.array([demand.get(name, 0.0) for name in self.resources], dtype=np.float64)
