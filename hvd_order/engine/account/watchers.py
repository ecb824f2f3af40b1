"""What shows the account of steps outside the process: a wing adds each, the configuration asks."""

from __future__ import annotations

from collections.abc import Callable

from hvd_order.base.wings import Registry
from hvd_order.engine.job.job import Job

__all__: list[str] = []

Watcher = Callable[[Job], None]
"""Begins to show a job; ends with it, by `Job.on_shutdown`."""

WATCHERS: Registry[Watcher] = Registry("watcher")


def begin(job: Job) -> None:
    """Begins what the configuration asks for, at the end of ``init()``. Collective.

    Raises:
        InvalidUsage: it cannot begin here; says why, and what to do.
    """
    # First what all ranks take part in: the other one may fail on a single rank.
    if job.config.watch and job.store is not None:
        WATCHERS.find("channel")(job)
    if job.config.metrics is not None:
        WATCHERS.find("metrics")(job)
