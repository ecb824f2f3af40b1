"""Parameter servers of any speed, for tests of who should hold which slice."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hvd_order.servers.balance.balancer import Balancer, Rebalance


@dataclass
class SimulatedServers:
    """What servers would need for a step.

    Attributes:
        speeds: bytes a second; may change between steps.
        slice_s: a slice costs this beside its bytes, at speed 1.
        noise: standard deviation of a measurement, relative.
        shared: servers behind one link: each is finished when all of them are.
    """

    sizes: Sequence[int]
    speeds: dict[int, float]
    slice_s: float = 0.0
    noise: float = 0.0
    shared: tuple[frozenset[int], ...] = ()
    random: random.Random = field(default_factory=lambda: random.Random(1))

    def times_s(self, owner: Sequence[int]) -> dict[int, float]:
        """By server, without noise."""
        times = dict.fromkeys(self.speeds, 0.0)
        for size, server in zip(self.sizes, owner, strict=True):
            times[server] += (size + self.slice_s) / self.speeds[server]
        for group in self.shared:
            total = sum(times[server] for server in group)
            times.update({server: total for server in group if times[server]})
        return times

    def step_s(self, owner: Sequence[int]) -> float:
        return max(self.times_s(owner).values())

    def figures(self, owner: Sequence[int]) -> dict[int, tuple[int, float]]:
        served = dict.fromkeys(self.speeds, 0)
        for size, server in zip(self.sizes, owner, strict=True):
            served[server] += size
        return {
            server: (served[server], seconds * max(0.2, self.random.gauss(1, self.noise)))
            for server, seconds in self.times_s(owner).items()
        }


@dataclass
class Run:
    """What happened: the true time of every step, and the changes after it."""

    steps_s: list[float] = field(default_factory=list)
    changes: list[tuple[int, Rebalance]] = field(default_factory=list)

    def of(self, why: str) -> list[Rebalance]:
        return [change for _, change in self.changes if change.why == why]

    def moved_bytes(self) -> int:
        return sum(move.size_bytes for _, change in self.changes for move in change.moves)


def drive(
    balancer: Balancer,
    servers: SimulatedServers,
    steps: int,
    speeds_at: Mapping[int, Mapping[int, float]] | None = None,
    lag: int = 0,
) -> Run:
    """Trains for some steps.

    Args:
        speeds_at: new speeds from a step on.
        lag: steps until a change is in force.
    """
    run = Run()
    in_force = balancer.assignment
    waiting: list[tuple[int, Rebalance]] = []
    for step in range(steps):
        servers.speeds.update((speeds_at or {}).get(step, {}))
        while waiting and waiting[0][0] <= step:
            in_force = waiting.pop(0)[1].assignment
        run.steps_s.append(servers.step_s(in_force.owner))
        change = balancer.step(servers.figures(in_force.owner), in_force.version)
        check_owners(balancer, servers.speeds)
        if change is not None:
            assert change.assignment == balancer.assignment
            run.changes.append((step, change))
            waiting.append((step + 1 + lag, change))
    return run


def check_owners(balancer: Balancer, living: Iterable[int]) -> None:
    assert set(balancer.assignment.owner) <= set(living)
