"""The file with the jobs of a real cluster: a table with a command for each."""

from __future__ import annotations

import csv
import math
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

_NEEDED = ("name", "command", "workers")
COLUMNS = (
    *_NEEDED, "arrival_s", "duration_s", "samples", "speed", "speed_apart", "least", "most",
    "worker", "batch", "most_batch", "noise_scale", "epoch_samples", "value", "due_s", "slope",
    "model",
)  # fmt: skip
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

    Needed are ``name``, ``command``, ``workers`` (that its user asks for), and ``duration_s`` (how
    long it takes alone with so many), or ``samples`` and ``speed`` (samples/s by workers, such as
    ``1:10 2:19 4:36``; ``speed_apart`` the same over several machines). ``arrival_s`` counts from
    the scheduler's first start (0). ``least`` and ``most`` are workers that it can run with
    (1, ``workers``). ``value``, ``slope`` and ``due_s`` are those of `Sigmoid`; without a slope the
    completion is worth ``value`` (1). A worker takes a slot, whatever ``worker`` says.

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
    name = row["name"].strip()
    if not _NAME.fullmatch(name):
        raise InvalidUsage(f"a job called {name!r}; expected letters, digits, '_', '-' and '.'")
    try:
        command = tuple(shlex.split(row["command"]))
    except ValueError as error:
        raise InvalidUsage(f"the command of job {name!r}: {error}") from None
    if not command:
        raise InvalidUsage(f"job {name!r} has no command")
    workers = int(_number(row, "workers", None, whole=True))
    batch = int(_number(row, "batch", 1, whole=True))
    samples, speed = _work(row, workers)
    job = Job(
        name,
        _number(row, "arrival_s", 0.0),
        samples,
        speed,
        worker={SLOT: 1.0},
        requested=workers,
        least=int(_number(row, "least", 1, whole=True)),
        most=int(_number(row, "most", workers, whole=True)),
        batch=batch,
        most_batch=int(_number(row, "most_batch", batch, whole=True)),
        noise_scale=_number(row, "noise_scale", math.nan) if _has(row, "noise_scale") else None,
        epoch_samples=_number(row, "epoch_samples", math.inf),
        utility=_utility(row),
        model=row.get("model", ""),
    )
    return ServedJob(job, command)


def _has(row: Mapping[str, str], name: str) -> bool:
    return bool(row.get(name, "").strip())


def _number(row: Mapping[str, str], name: str, default: float | None, whole: bool = False) -> float:
    text = row.get(name, "").strip()
    if not text and default is not None:
        return default
    try:
        return int(text) if whole else float(text)
    except ValueError:
        kind = "a whole number" if whole else "a number"
        raise InvalidUsage(f"{name} is {text!r}; expected {kind}") from None


def _work(row: Mapping[str, str], workers: int) -> tuple[float, TableSpeed]:
    """Samples and speed."""
    if _has(row, "duration_s"):
        if _has(row, "speed"):
            raise InvalidUsage("both duration_s and speed; expected one of them")
        duration_s = _number(row, "duration_s", None)
        samples = _number(row, "samples", duration_s * workers)
        if not duration_s > 0:
            raise InvalidUsage(f"duration_s is {duration_s}; expected more than 0")
        return samples, TableSpeed({workers: samples / duration_s})
    if not _has(row, "speed") or not _has(row, "samples"):
        raise InvalidUsage("no duration_s; expected it, or samples and speed")
    apart = _speeds(row, "speed_apart") if _has(row, "speed_apart") else None
    return _number(row, "samples", None), TableSpeed(_speeds(row, "speed"), apart)


def _speeds(row: Mapping[str, str], name: str) -> dict[int, float]:
    text = row[name]
    try:
        pairs = [pair.split(":") for pair in text.split()]
        return {int(workers): float(rate) for workers, rate in pairs}
    except ValueError:
        raise InvalidUsage(f"{name} is {text!r}; expected pairs such as '1:10 2:19' of workers and "
                           "samples/s") from None  # fmt: skip


def _utility(row: Mapping[str, str]) -> Utility:
    value = _number(row, "value", 1.0)
    if not _has(row, "slope"):
        return Constant(value)
    return Sigmoid(value, _number(row, "slope", None), _number(row, "due_s", None))
