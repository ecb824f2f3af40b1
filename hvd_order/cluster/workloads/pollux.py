"""Workloads of Pollux: name,time,application,num_replicas,batch_size.

Origin: petuum/adaptdl, branch osdi21-artifact, simulator/workloads (Apache-2.0; Qiao et al.,
"Pollux", OSDI 2021). Times are in seconds; num_replicas and batch_size are what a user would ask
for. Speeds and lengths of the six applications are those of ``applications.py``. Any number of
workers from one on is possible that the application's batches feed.
"""

from __future__ import annotations

from hvd_order.base.tables import Path, read_lines
from hvd_order.cluster.model.job import ClusterJob
from hvd_order.cluster.workloads.applications import APPLICATIONS
from hvd_order.cluster.workloads.numbered import Numbered

__all__ = ["COLUMNS", "read_pollux_workload"]

COLUMNS = ("name", "time", "application", "num_replicas", "batch_size")


def read_pollux_workload(path: Path) -> Numbered:
    """Reads the jobs.

    Raises:
        InvalidUsage: a line is no job, or its application is unknown.
    """
    for line in read_lines(path, COLUMNS):
        name = line.text("application")
        application = APPLICATIONS.get(name)
        if application is None:
            raise line.wrong(f"application is {name!r}; known are {', '.join(APPLICATIONS)}")
        workers, batch = line.whole("num_replicas", 1), line.whole("batch_size", 1)
        if batch < workers:
            raise line.wrong(f"{workers} workers share a batch of {batch}; expected a sample for "
                             "each at least")  # fmt: skip
        yield (
            line,
            ClusterJob(
                line.text("name"),
                line.number_of("time"),
                application.samples(batch),
                application.speed,
                {"gpu": 1},
                requested=workers,
                most=max(application.most_workers, workers),
                batch=batch,
                most_batch=max(application.most_batch, batch),
                noise_scale=application.noise_scale,
                epoch_samples=float(application.epoch_samples),
                model=name,
            ),
        )
