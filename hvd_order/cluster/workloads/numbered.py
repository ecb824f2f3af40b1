"""What the loaders of traces share: jobs with their lines, and jobs of known duration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hvd_order.base.errors import InvalidUsage
from hvd_order.base.tables import TableRow
from hvd_order.cluster.model.job import ClusterJob
from hvd_order.cluster.model.speed import TableSpeed

__all__ = ["Numbered", "checked", "timed_job"]

Numbered = Iterator[tuple[TableRow, ClusterJob]]
"""Jobs, each with the line that it was read from."""


def timed_job(
    line: TableRow,
    name: str,
    arrival_s: float,
    duration_s: float,
    workers: int,
    worker: Mapping[str, float],
    model: str = "",
) -> ClusterJob:
    """A job of which a trace says no more than how long it ran with how many workers.

    A sample is a second of a worker. Assumed, as traces do not say it: with fewer workers it is
    slower in proportion, more do not help, and one machine or several make no difference.

    Raises:
        InvalidUsage: no such job is possible; names the line.
    """
    try:
        return ClusterJob(
            name,
            arrival_s,
            samples=duration_s * workers,
            speed=TableSpeed({workers: float(workers)}),
            worker=worker,
            requested=workers,
            most=workers,
            model=model,
        )
    except InvalidUsage as error:
        raise line.wrong(str(error)) from None


def checked(jobs: Numbered) -> Numbered:
    """Refuses jobs that arrive before the one in front of them, and names that occur twice.

    Raises:
        InvalidUsage: so; names the line.
    """
    names: set[str] = set()
    latest_s = 0.0
    for line, job in jobs:
        if job.arrival_s < latest_s:
            raise line.wrong(f"job {job.name!r} arrives at {job.arrival_s:g} s, but a line above "
                             f"it at {latest_s:g} s; sort the lines by time")  # fmt: skip
        if job.name in names:
            raise line.wrong(f"a second job is called {job.name!r}")
        names.add(job.name)
        latest_s = job.arrival_s
        yield line, job
