"""The jobs of a real cluster: the project's table of jobs, with a command for each."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hvd_order.base.errors import InvalidUsage
from hvd_order.base.tables import TableRow
from hvd_order.cluster.model.job import ClusterJob
from hvd_order.cluster.workloads.own import COMMAND, own_job, read_own

__all__ = ["SLOT", "ServedJob", "job_of", "read_jobs"]

SLOT = "slot"
"""The resource of which a worker takes one."""

_NAME = re.compile(r"\w[\w.-]*")  # it is a folder's name as well


@dataclass(frozen=True)
class ServedJob:
    """A job and how it is started.

    Attributes:
        command: program and arguments of each worker.
    """

    job: ClusterJob
    command: tuple[str, ...]


def read_jobs(path: Path) -> list[tuple[Mapping[str, str], ServedJob]]:
    """Reads a table of jobs as of ``workloads.own``, with the column ``command``.

    ``arrival_s`` counts from the scheduler's first start. A worker takes one slot.

    Returns:
        For each job its columns, to be kept, and the job.

    Raises:
        InvalidUsage: the table is wrong; the message names the line.
    """
    found: dict[str, tuple[Mapping[str, str], ServedJob]] = {}
    for line, job in read_own(path):
        if COMMAND not in line.fields:
            raise InvalidUsage(f"{path} has no column {COMMAND!r}, which says what each job runs")
        if job.name in found:
            raise line.wrong(f"a second job {job.name!r}")
        found[job.name] = (line.fields, _served(line, job))
    return list(found.values())


def job_of(row: Mapping[str, str]) -> ServedJob:
    """The job of columns that were kept.

    Raises:
        InvalidUsage: a field is wrong.
    """
    line = TableRow("a job that was kept", 1, row)
    return _served(line, own_job(line))


def _served(line: TableRow, job: ClusterJob) -> ServedJob:
    if not _NAME.fullmatch(job.name):
        raise line.wrong(f"a job called {job.name!r}; expected letters, digits, '_', '-' and '.'")
    try:
        command = tuple(shlex.split(line.fields[COMMAND]))
    except ValueError as error:
        raise line.wrong(f"the command of job {job.name!r}: {error}") from None
    if not command:
        raise line.wrong(f"job {job.name!r} has no command")
    if job.workers_per_server is not None:
        raise line.wrong(f"job {job.name!r} has parameter servers, which are not served")
    return ServedJob(replace(job, worker={SLOT: 1.0}), command)
