"""Random jobs and machines such as the papers on PD-ORS and OASiS use.

Read: the ranges of Bao et al., "Online Job Scheduling in Distributed Machine Learning Clusters"
(OASiS), INFOCOM 2018, section VI, and of Yu et al., "A Sum-of-Ratios Multi-Dimensional-Knapsack
Decomposition for DNN Resource Scheduling" (SMD), INFOCOM 2021: epochs, gradient bytes, demands,
link rates, and utilities with their shares of jobs. Reconstructed, as the text of PD-ORS was not
read: samples of an epoch, global batch, computation of a sample, workers per server. Assumed here:
what the attributes of ``Ranges`` and ``paper_machines`` mark so.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from hvd_order.base.errors import InvalidUsage
from hvd_order.cluster.model.job import ClusterJob
from hvd_order.cluster.model.machines import Machines
from hvd_order.cluster.model.speed import LocalitySpeed
from hvd_order.cluster.model.utility import Sigmoid

__all__ = ["Ranges", "paper_machines", "random_jobs"]

_BYTES_PER_GBIT = 1e9 / 8
_MOST_DRAWS = 1000


@dataclass(frozen=True)
class Ranges:
    """Ranges from which jobs are drawn, each number of a range as likely as any other.

    Attributes:
        epochs: of a job.
        epoch_samples: samples of an epoch.
        batch: samples of a step of all workers; also the most workers.
        compute_slots: computation of a sample, in slots.
        gradient_mb: bytes of the gradients, in millions.
        workers_per_server: workers that share a server.
        network_gbit: link of a worker over the network, Gbit/s.
        inside: rate of a link within a machine over that of the network (assumed).
        requested: workers that a user asks for, at most the batch (OASiS' set-up of FIFO).
        worker_gpu: of a worker alone; servers have none.
        cpu, memory_gb, disk_gb: of a worker and of a server, drawn for each of the two.
        value: worth of an early completion.
        due_slots: latency at which half of it is lost.
        slopes: loss per slot, by kind of job: whom time does not matter to, whom it does, urgent.
        shares: of jobs of the kinds.
    """

    epochs: tuple[int, int] = (50, 200)
    epoch_samples: tuple[int, int] = (20_000, 500_000)
    batch: tuple[int, int] = (1, 200)
    compute_slots: tuple[float, float] = (1e-5, 1e-4)
    gradient_mb: tuple[float, float] = (30, 575)
    workers_per_server: tuple[int, int] = (1, 10)
    network_gbit: tuple[float, float] = (0.1, 5)
    inside: float = 10.0
    requested: tuple[int, int] = (1, 30)
    worker_gpu: tuple[int, int] = (0, 4)
    cpu: tuple[int, int] = (1, 10)
    memory_gb: tuple[int, int] = (2, 32)
    disk_gb: tuple[int, int] = (5, 10)
    value: tuple[float, float] = (1, 100)
    due_slots: tuple[float, float] = (1, 15)
    slopes: tuple[tuple[float, float], ...] = ((0, 0), (0.01, 1), (4, 6))
    shares: tuple[float, ...] = (0.10, 0.55, 0.35)


def random_jobs(
    count: int,
    seed: int,
    *,
    slots: int = 80,
    slot_s: float = 3600.0,
    arrivals: Literal["uniform", "poisson"] = "uniform",
    ranges: Ranges | None = None,
) -> Iterator[ClusterJob]:
    """Draws jobs, by time of arrival. The same arguments give the same jobs.

    A job that would not end within ``slots`` slots with all the workers that it may have, over the
    network, is drawn again (assumed: some draws of the papers' ranges exchange for hours what a
    second computed).

    Args:
        slots: of the run. Jobs arrive at starts of slots: uniformly over the slots; or by Poisson,
            with a mean gap of ``slots / count``, the last ones perhaps behind the run's end.
        slot_s: length of a slot (OASiS: an hour or more, 20 minutes in its testbed). Computation is
            drawn in slots, link rates in bytes a second: in short slots, exchanges dominate.

    Raises:
        InvalidUsage: a number is impossible, or the ranges allow no job that ends in time.
    """
    if count < 0 or slots < 1 or not slot_s > 0 or arrivals not in ("uniform", "poisson"):
        raise InvalidUsage(f"{count} jobs in {slots} slots of {slot_s} s with {arrivals!r} "
                           "arrivals; expected at least 0, at least 1, more than 0, and uniform or "
                           "poisson")  # fmt: skip
    found = ranges or Ranges()
    random_ = random.Random(seed)
    for number, slot in enumerate(_arrivals(random_, count, slots, arrivals)):
        for _ in range(_MOST_DRAWS):
            job = _job(random_, number, slot * slot_s, slot_s, found)
            if _fastest_s(job) <= slots * slot_s:
                yield job
                break
        else:
            raise InvalidUsage(f"{_MOST_DRAWS} random jobs, and none would end within {slots} "
                               "slots; use more slots or other ranges")  # fmt: skip


def _arrivals(random_: random.Random, count: int, slots: int, kind: str) -> Iterator[int]:
    if kind == "uniform":
        yield from sorted(random_.randrange(slots) for _ in range(count))
        return
    at = 0.0
    for _ in range(count):
        at += random_.expovariate(count / slots)
        yield int(at)


def _fastest_s(job: ClusterJob) -> float:
    rate = job.speed.samples_per_s(job.most, job.servers_for(job.most), 2, job.batch)
    return job.samples / rate


def _job(
    random_: random.Random, number: int, arrival_s: float, slot_s: float, ranges: Ranges
) -> ClusterJob:  # fmt: skip
    def demand(gpu: int) -> dict[str, float]:
        found = {"gpu": float(gpu)} if gpu else {}
        for name in ("cpu", "memory_gb", "disk_gb"):
            found[name] = float(random_.randint(*getattr(ranges, name)))
        return found

    batch = random_.randint(*ranges.batch)
    epoch_samples = random_.randint(*ranges.epoch_samples)
    workers_per_server = random_.randint(*ranges.workers_per_server)
    gradient_bytes = random_.uniform(*ranges.gradient_mb) * 1e6
    network = random_.uniform(*ranges.network_gbit) * _BYTES_PER_GBIT
    (slope,) = random_.choices(ranges.slopes, ranges.shares)
    return ClusterJob(
        f"job-{number}",
        arrival_s,
        float(random_.randint(*ranges.epochs) * epoch_samples),
        LocalitySpeed(
            random_.uniform(*ranges.compute_slots) * slot_s,
            2 * gradient_bytes * workers_per_server / batch,
            network * ranges.inside,
            network,
        ),
        demand(random_.randint(*ranges.worker_gpu)),
        demand(0),
        workers_per_server,
        requested=min(random_.randint(*ranges.requested), batch),
        most=batch,
        batch=batch,
        epoch_samples=float(epoch_samples),
        utility=Sigmoid(
            random_.uniform(*ranges.value),
            random_.uniform(*slope) / slot_s,
            random_.uniform(*ranges.due_slots) * slot_s,
        ),
    )


def paper_machines(count: int = 100) -> Machines:
    """Machines such as PD-ORS' "EC2 C5n".

    Of c5n.18xlarge, as its vendor says: 72 processors, 192 GiB, 100 Gbit/s. That type has no GPUs,
    though the papers' workers take some. Assumed here: 12 GPUs, the 600 GPUs to 3,400 processors of
    SMD's unit of capacity, rounded down; and a disk of 300 GB.
    """
    capacity = {"gpu": 12.0, "cpu": 72.0, "memory_gb": 192.0, "disk_gb": 300.0}
    return Machines.alike(count, capacity, 100 * _BYTES_PER_GBIT)
