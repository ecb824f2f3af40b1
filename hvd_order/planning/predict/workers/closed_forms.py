"""Throughput in closed form: mean-value analysis, bounds, and the formulas of Optimus and Pollux.

They stand beside the simulation as baselines; none of them knows the order of transfers or the
overlap of transfers with computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from hvd_order.base.errors import InvalidUsage

__all__ = [
    "OptimusAsync",
    "OptimusSync",
    "Pollux",
    "mean_value_analysis",
    "upper_bound",
]


def mean_value_analysis(think_s: float, stations_s: Sequence[float], workers: int) -> list[float]:
    """Steps/s of 1 to ``workers`` asynchronous workers, without overlap within a step.

    A closed queueing network: workers compute for ``think_s`` and then visit each station, a
    link or a server's update, which its visitors share. Exact for computation times that vary
    enough to mix.

    Args:
        stations_s: time that a step takes alone at each station.

    Raises:
        InvalidUsage: a negative time, all times 0, or less than one worker.

    Source: Reiser and Lavenberg, Journal of the ACM 27(2), 1980.
    """
    if workers < 1 or min([think_s, *stations_s]) < 0 or think_s + sum(stations_s) <= 0:
        raise InvalidUsage(
            f"{workers} workers, {think_s} s of computation, stations of {list(stations_s)} s; "
            "expected one worker or more, and times that are not negative nor all 0"
        )
    queues = [0.0] * len(stations_s)
    found = []
    for count in range(1, workers + 1):
        stays = [s * (1 + queue) for s, queue in zip(stations_s, queues, strict=True)]
        rate = count / (think_s + sum(stays))
        queues = [rate * stay for stay in stays]
        found.append(rate)
    return found


def upper_bound(think_s: float, stations_s: Sequence[float], workers: int) -> float:
    """The most steps/s without overlap within a step: W / (Z + sum S), and 1 / max S.

    Source: Muntz and Wong, Conference on Information Sciences and Systems, 1974.
    """
    return min(workers / (think_s + sum(stations_s)), 1 / max([*stations_s, 1e-300]))


def _weighted(coefficients: Sequence[float], terms: Sequence[float]) -> float:
    return sum(k * t for k, t in zip(coefficients, terms, strict=True))


@dataclass(frozen=True)
class OptimusAsync:
    """Steps/s of asynchronous workers: w / (a + b w/p + c w + d p).

    Source: Peng et al., "Optimus", EuroSys 2018, section 3.2.
    """

    a: float
    b: float
    c: float
    d: float

    @staticmethod
    def terms(workers: int, servers: int) -> list[float]:
        """The factors of a, b, c, d in the time of a step."""
        return [1.0, workers / servers, float(workers), float(servers)]

    def steps_per_s(self, workers: int, servers: int) -> float:
        """Of all workers together."""
        terms = self.terms(workers, servers)
        return workers / _weighted(astuple(self), terms)


@dataclass(frozen=True)
class OptimusSync:
    """Steps/s of synchronous workers: 1 / (a G/w + b + c w/p + d w + e p), G the global batch.

    Source: Peng et al., "Optimus", EuroSys 2018, section 3.2.
    """

    a: float
    b: float
    c: float
    d: float
    e: float

    @staticmethod
    def terms(workers: int, servers: int, global_batch: float) -> list[float]:
        """The factors of a, b, c, d, e in the time of a step."""
        return [global_batch / workers, 1.0, workers / servers, float(workers), float(servers)]

    def steps_per_s(self, workers: int, servers: int, global_batch: float) -> float:
        """Of the job."""
        terms = self.terms(workers, servers, global_batch)
        return 1 / _weighted(astuple(self), terms)


@dataclass(frozen=True)
class Pollux:
    """Seconds a step of an all-reduce job: (T_grad^g + T_sync^g)^(1/g).

    T_grad = ac + bc m for a batch of m a worker. T_sync is 0 for one worker, al + bl (k - 2) for k
    workers on one node, and an + bn (k - 2) on several.

    Source: Qiao et al., "Pollux", OSDI 2021, section 3.2.
    """

    ac: float
    bc: float
    an: float
    bn: float
    gamma: float
    al: float = 0.0
    bl: float = 0.0

    @staticmethod
    def spread(workers: int, nodes: int) -> float:
        """The factor of beta in T_sync."""
        return workers - 2.0

    def gradient_s(self, batch: float) -> float:
        """T_grad."""
        return self.ac + self.bc * batch

    def sync_s(self, workers: int, nodes: int) -> float:
        """T_sync of two or more workers."""
        alpha, beta = (self.al, self.bl) if nodes == 1 else (self.an, self.bn)
        return alpha + beta * self.spread(workers, nodes)

    def step_s(self, batch: float, workers: int, nodes: int) -> float:
        """Time of a step."""
        gradient_s = self.gradient_s(batch)
        if workers == 1:
            return gradient_s
        sync_s = self.sync_s(workers, nodes)
        return float((gradient_s**self.gamma + sync_s**self.gamma) ** (1 / self.gamma))
