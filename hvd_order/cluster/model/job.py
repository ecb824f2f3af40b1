"""A training job that somebody wants to run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from hvd_order.base.errors import InvalidUsage
from hvd_order.cluster.model.machines import Machines
from hvd_order.cluster.model.placement import JobPlacement
from hvd_order.cluster.model.speed import Speed
from hvd_order.cluster.model.utility import Constant, Utility
from hvd_order.planning.graph.graph import Graph

__all__ = ["ClusterJob", "check_job"]


@dataclass(frozen=True)
class ClusterJob:
    """A job: data-parallel workers, and parameter servers unless it all-reduces.

    Attributes:
        name: no other job has it.
        arrival_s: when it is submitted.
        samples: to train, of all epochs.
        speed: how fast it trains.
        worker: amount of each resource that a worker takes, such as ``{"gpu": 1}``.
        server: the same for a server.
        workers_per_server: a server serves as many workers; None: no servers.
        requested: workers that its user asked for. Policies that do not scale jobs give them.
        least, most: workers that it can run with.
        batch: samples of a step of all workers, as its user set it.
        most_batch: largest batch that training stands; None: ``batch``.
        noise_scale: gradient noise scale in samples; None: samples are worth the same in any batch.
        epoch_samples: samples of an epoch.
        utility: worth of its completion.
        model: what it trains, for reports.
        graph: what a worker computes and sends in a step, where jobs share links; None: it sends
            nothing there.

    Raises:
        InvalidUsage: a number is impossible.
    """

    name: str
    arrival_s: float
    samples: float
    speed: Speed
    worker: Mapping[str, float]
    server: Mapping[str, float] = field(default_factory=dict)
    workers_per_server: int | None = None
    requested: int = 1
    least: int = 1
    most: int = 1
    batch: int = 1
    most_batch: int | None = None
    noise_scale: float | None = None
    epoch_samples: float = math.inf
    utility: Utility = field(default_factory=Constant)
    model: str = ""
    graph: Graph | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        def refuse(what: str) -> None:
            raise InvalidUsage(f"job {self.name!r}: {what}")

        if not 0 <= self.arrival_s < math.inf:
            refuse(f"it arrives at {self.arrival_s} s; expected 0 or later")
        if not 0 < self.samples < math.inf:
            refuse(f"{self.samples} samples; expected more than 0")
        if not 1 <= self.least <= self.requested <= self.most:
            refuse(f"{self.requested} workers of {self.least} to {self.most}; expected "
                   "1 <= least <= requested <= most")  # fmt: skip
        if self.batch < 1 or (self.most_batch is not None and self.most_batch < self.batch):
            refuse(f"a batch of {self.batch}, at most {self.most_batch}; expected at least 1")
        if self.workers_per_server is not None and self.workers_per_server < 1:
            refuse(f"{self.workers_per_server} workers a server; expected at least 1")
        for who, demand in (("worker", self.worker), ("server", self.server)):
            if any(not 0 <= amount < math.inf for amount in demand.values()):
                refuse(f"a {who} takes {dict(demand)}; expected amounts of at least 0")

    def servers_for(self, workers: int) -> int:
        """Fewest servers for the workers."""
        return 0 if self.workers_per_server is None else -(-workers // self.workers_per_server)

    def samples_per_s(self, placement: JobPlacement) -> float:
        """Progress of a placement: samples a second, those of a large batch at their worth."""
        batch = placement.batch or self.batch
        rate = self.speed.samples_per_s(
            placement.workers, placement.servers, placement.machines, batch
        )
        return rate * self.efficiency(batch)

    def efficiency(self, batch: int) -> float:
        """Worth of a sample of a batch, over one of the batch that the user set.

        Source: Qiao et al., "Pollux", OSDI 2021, section 2.2: (phi + m0) / (phi + m).
        """
        if self.noise_scale is None:
            return 1.0
        return (self.noise_scale + self.batch) / (self.noise_scale + batch)

    def alone_s(self, workers: int | None = None) -> float:
        """Time that it takes with as many workers on one machine; None: the requested ones."""
        count = workers or self.requested
        rate = self.speed.samples_per_s(count, self.servers_for(count), 1, self.batch)
        return self.samples / rate if rate > 0 else math.inf


def check_job(job: ClusterJob, machines: Machines) -> None:
    """Refuses a job that the empty cluster cannot hold.

    Raises:
        InvalidUsage: so; the message says what is missing.
    """
    worker, server = machines.amounts(job.worker), machines.amounts(job.server)
    servers = job.servers_for(job.least)
    for who, demand, count in (("worker", worker, job.least), ("server", server, servers)):
        needed = demand > 0
        if count == 0 or not needed.any():
            continue
        room = np.floor((machines.capacity[:, needed] / demand[needed]).min(axis=1) + 1e-9).sum()
        if room < count:
            wanted = ", ".join(f"{a:g} {r}" for r, a in zip(machines.resources, demand, strict=True)
                               if a)  # fmt: skip
            raise InvalidUsage(f"job {job.name!r} needs {count} {who}s of {wanted}; all machines "
                               f"together hold {room:.0f}")  # fmt: skip
    whole = job.least * worker + servers * server
    if (whole > machines.capacity.sum(axis=0) + 1e-9).any():
        raise InvalidUsage(f"job {job.name!r}: {job.least} workers and {servers} servers need more "
                           "than all machines together have")  # fmt: skip
