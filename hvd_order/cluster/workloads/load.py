"""Loads jobs from traces of any known format."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from hvd_order.base.errors import InvalidUsage
from hvd_order.base.tables import Path, read_header
from hvd_order.cluster.model.job import ClusterJob, check_job
from hvd_order.cluster.model.machines import Machines
from hvd_order.cluster.workloads import gavel, own, pai, philly, pollux, tiresias
from hvd_order.cluster.workloads.numbered import Numbered, checked

__all__ = ["DATA", "FORMATS", "check_all", "load_jobs"]

DATA = os.path.join(os.path.dirname(__file__), "data")
"""Folder of the traces that are shipped; its README.md says where they are from."""

_GAVEL = "gavel"


@dataclass(frozen=True)
class _TraceFormat:
    columns: Sequence[str]
    read: Callable[[Path], Numbered]


_TABLES = {
    "jobs": _TraceFormat(own.NEEDED, own.read_own),
    "pollux": _TraceFormat(pollux.COLUMNS, pollux.read_pollux_workload),
    "tiresias": _TraceFormat(tiresias.COLUMNS, tiresias.read_tiresias),
    "philly": _TraceFormat(philly.COLUMNS, philly.read_philly),
    "pai": _TraceFormat(pai.POD_COLUMNS, pai.read_pai_pods),
}

FORMATS = (*_TABLES, _GAVEL)
"""Names of the formats; ``jobs`` is the project's own."""


def load_jobs(
    path: Path,
    format: str | None = None,
    *,
    throughputs: Path | None = None,
    device: str = "v100",
) -> Iterator[ClusterJob]:
    """Reads jobs one after the other, by time of arrival.

    Args:
        format: one of ``FORMATS``; None: the one whose columns the file has.
        throughputs: of Gavel's jobs; None: those that are shipped.
        device: GPU type in the throughputs.

    Raises:
        InvalidUsage: the format is unknown, or a line is no job, arrives before the one above it or
            has another's name. Raised while jobs are read; names file and line.
    """
    for _, job in _numbered(path, format, throughputs, device):
        yield job


def check_all(
    path: Path,
    machines: Machines,
    format: str | None = None,
    *,
    throughputs: Path | None = None,
    device: str = "v100",
    requested: bool = True,
) -> int:
    """Reads all jobs and checks that the empty cluster can hold each of them.

    Call it before ``load_jobs``, so that a bad line near the end does not leave half a result.

    Args:
        requested: with the workers that its user asked for; else with the least.

    Returns:
        how many jobs there are.

    Raises:
        InvalidUsage: as ``load_jobs``, or a job does not fit; names the line.
    """
    count = 0
    for line, job in _numbered(path, format, throughputs, device):
        try:
            check_job(replace(job, least=job.requested) if requested else job, machines)
        except InvalidUsage as error:
            raise line.wrong(str(error)) from None
        count += 1
    return count


def _numbered(path: Path, format: str | None, throughputs: Path | None, device: str) -> Numbered:
    name = format or _detect(path)
    if name == _GAVEL:
        rates = gavel.read_throughputs(
            throughputs or os.path.join(DATA, "gavel-throughputs.json"), device
        )
        return checked(gavel.read_gavel(path, rates))
    if name not in _TABLES:
        raise InvalidUsage(f"no format of traces is called {name!r}; there are: "
                           f"{', '.join(FORMATS)}")  # fmt: skip
    return checked(_TABLES[name].read(path))


def _detect(path: Path) -> str:
    header = [field.strip() for field in read_header(path)]
    for name, known in _TABLES.items():
        if set(known.columns) <= set(header):
            return name
    if len(read_header(path, "\t")) == len(gavel.COLUMNS):
        return _GAVEL
    # The format that it is most like tells what is missing.
    shared = {n: len(set(k.columns) & set(header)) / len(k.columns) for n, k in _TABLES.items()}
    near = max(shared, key=lambda n: shared[n])
    hint = ""
    if shared[near] > 0:
        missing = [column for column in _TABLES[near].columns if column not in header]
        hint = f"; it lacks {', '.join(missing)} of the format {near!r}"
    raise InvalidUsage(f"{os.fspath(path)}, line 1: columns of no known format{hint}; there are: "
                       f"{', '.join(FORMATS)}")  # fmt: skip
