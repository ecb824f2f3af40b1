"""The file with the jobs of a real cluster: a table with a command for each."""

from __future__ import annotations

import csv
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvd_order.cluster.model.job import Job
from hvd_order.cluster.model.speed import TableSpeed
from hvd_order.cluster.model.utility import Constant, Sigmoid, Utility
from hvd_order.errors import InvalidUsage

__all__ = ["COLUMNS", "SLOT", "ServedJob", "job_of", "read_jobs"]

SLOT = "slot"
"""The resource of which a worker takes one."""

COLUMNS = ("job", "command", "samples", "samples_per_s", "arrival_s", "requested", "least", "most",
           "batch", "epoch_samples", "model", "value", "slope", "due_s")  # fmt: skip
_NEEDED = ("job", "command", "samples")
_NAME = re.compile(r"\w[\w.-]*")  # it is a folder's name as well


@dataclass(frozen=True)
class ServedJob:
    """A job and how it is started.

    Attributes:
        command: program and arguments of each worker.
    """

    job: Job
    command: tuple[str, ...]


def read_jobs(path: Path) -> list[tuple[Mapping[str, str], ServedJob]]:
    """Reads a table of jobs: CSV with a line of column names.

    Needed are ``job``, ``command`` and ``samples``. ``samples_per_s`` is one number, of each
    worker (default: 1, which makes samples seconds of a worker), or pairs such as
    ``1:10 2:19 4:36`` of numbers of workers and the speed of all of them. ``requested``, ``least``
    and ``most`` are workers (default: ``requested``, which is 1). ``value``, ``slope`` and
    ``due_s`` are those of `Sigmoid`; without a slope the completion is worth ``value`` (1).

    Returns:
        For each job its columns, to be kept, and the job.

    Raises:
        InvalidUsage: the table is wrong; the message names the line.
        OSError: it cannot be read.
    """
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file, restkey="", restval="")
        names = list(rows.fieldnames or ())
        unknown = [name for name in names if name not in COLUMNS]
        missing = [name for name in _NEEDED if name not in names]
        if unknown or missing:
            what = f"a column {unknown[0]!r}" if unknown else f"no column {missing[0]!r}"
            raise InvalidUsage(f"{path} has {what}; columns are {', '.join(COLUMNS)}, of which "
                               f"{', '.join(_NEEDED)} must be there")  # fmt: skip
        found: dict[str, tuple[Mapping[str, str], ServedJob]] = {}
        for row in rows:
            where = f"{path}, line {rows.line_num}"
            if "" in row:
                raise InvalidUsage(f"{where}: more fields than columns; quote a field with commas")
            try:
                served = job_of(row)
            except InvalidUsage as error:
                raise InvalidUsage(f"{where}: {error}") from None
            if served.job.name in found:
                raise InvalidUsage(f"{where}: a second job {served.job.name!r}")
            found[served.job.name] = (row, served)
    return list(found.values())


def job_of(row: Mapping[str, str]) -> ServedJob:
    """The job of a line.

    Raises:
        InvalidUsage: a field is wrong.
    """
    name = row["job"].strip()
    if not _NAME.fullmatch(name):
        raise InvalidUsage(f"a job called {name!r}; expected letters, digits, '_', '-' and '.'")
    try:
        command = tuple(shlex.split(row["command"]))
    except ValueError as error:
        raise InvalidUsage(f"the command of job {name!r}: {error}") from None
    if not command:
        raise InvalidUsage(f"job {name!r} has no command")
    requested = int(_number(row, "requested", 1, whole=True))
    least = int(_number(row, "least", requested, whole=True))
    most = int(_number(row, "most", requested, whole=True))
    batch = int(_number(row, "batch", 1, whole=True))
    job = Job(
        name,
        _number(row, "arrival_s", 0.0),
        _number(row, "samples", None),
        _speed(row, max(most, 1)),
        worker={SLOT: 1.0},
        requested=requested,
        least=least,
        most=most,
        batch=batch,
        epoch_samples=_number(row, "epoch_samples", float("inf")),
        utility=_utility(row),
        model=row.get("model", ""),
    )
    return ServedJob(job, command)


def _number(row: Mapping[str, str], name: str, default: float | None, whole: bool = False) -> float:
    text = row.get(name, "").strip()
    if not text and default is not None:
        return default
    try:
        return int(text) if whole else float(text)
    except ValueError:
        kind = "a whole number" if whole else "a number"
        raise InvalidUsage(f"{name} is {text!r}; expected {kind}") from None


def _speed(row: Mapping[str, str], most: int) -> TableSpeed:
    text = row.get("samples_per_s", "").strip()
    if ":" not in text:
        each = _number(row, "samples_per_s", 1.0)
        return TableSpeed({1: each, most: each * most})
    try:
        pairs = [pair.split(":") for pair in text.split()]
        return TableSpeed({int(workers): float(rate) for workers, rate in pairs})
    except ValueError:
        raise InvalidUsage(f"samples_per_s is {text!r}; expected a number, or pairs such as "
                           "'1:10 2:19' of workers and samples/s") from None  # fmt: skip


def _utility(row: Mapping[str, str]) -> Utility:
    value = _number(row, "value", 1.0)
    if not row.get("slope", "").strip():
        return Constant(value)
    return Sigmoid(value, _number(row, "slope", None), _number(row, "due_s", None))
