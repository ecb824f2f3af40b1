"""Traces of Gavel, and the throughputs that give their jobs speeds.

Origin: stanford-futuredata/gavel, scheduler/traces (MIT; Narayanan et al., "Gavel", OSDI 2020). A
line has ten fields between tabs: job type, command, folder, argument of the number of steps,
whether it needs data, steps, scale factor (workers), priority, SLO, arrival in seconds. There is no
header. Read: job type, steps, scale factor, priority, arrival; the priority is the worth of the
job's completion, at any time.

Throughputs are JSON: GPU type -> "('job type', scale factor)" -> "null" -> steps/s of a job alone.
A sample is a step. With fewer workers a job has the throughput of its job type for as many, where
the file has it. Assumed: with a step of more workers it needs no fewer steps, as in Gavel; and one
machine or several make no difference.
"""

from __future__ import annotations

import ast
import json
import os

from hvd_order.base.errors import InvalidUsage
from hvd_order.base.tables import Path, open_text, read_lines
from hvd_order.cluster.model.job import ClusterJob
from hvd_order.cluster.model.speed import TableSpeed
from hvd_order.cluster.model.utility import Constant
from hvd_order.cluster.workloads.numbered import Numbered

__all__ = ["COLUMNS", "read_gavel", "read_throughputs"]

COLUMNS = ("job_type", "command", "folder", "steps_argument", "needs_data", "steps",
           "scale_factor", "priority", "slo", "arrival")  # fmt: skip

Throughputs = dict[str, dict[int, float]]


def read_throughputs(path: Path, device: str) -> Throughputs:
    """Steps/s of jobs alone, by job type and workers.

    Raises:
        InvalidUsage: the file has no such throughputs, or none for the GPU type.
    """
    name = os.fspath(path)
    with open_text(path) as file:
        try:
            whole = json.load(file)
        except ValueError as error:
            raise InvalidUsage(f"{name}: no JSON: {error}") from None
    if not isinstance(whole, dict) or not isinstance(whole.get(device), dict):
        types = ", ".join(whole) if isinstance(whole, dict) else "none"
        raise InvalidUsage(f"{name}: no GPU type {device!r}; it has {types}")
    found: Throughputs = {}
    for key, entry in whole[device].items():
        try:
            job_type, scale = ast.literal_eval(key)
            rate = float(entry["null"])
            # Gavel writes 0 where a job does not run at all.
            if rate > 0:
                found.setdefault(str(job_type), {})[int(scale)] = rate
        except (ValueError, SyntaxError, TypeError, KeyError):
            raise InvalidUsage(
                f"{name}: {device}, {key!r}: {str(entry)[:60]}; expected "
                '"(\'job type\', workers)": {"null": steps/s}'
            ) from None
    return found


def read_gavel(path: Path, throughputs: Throughputs) -> Numbered:
    """Reads the jobs.

    Raises:
        InvalidUsage: a line is no job, or there is no throughput for it.
    """
    for line in read_lines(path, COLUMNS, delimiter="\t", columns=COLUMNS):
        job_type, workers = line.text("job_type"), line.whole("scale_factor", 1)
        known = throughputs.get(job_type, {})
        if workers not in known:
            raise line.wrong(f"no throughput of {job_type!r} with {workers} workers; known are "
                             f"{', '.join(map(repr, throughputs))}")  # fmt: skip
        steps = line.number_of("steps", above=0)
        yield (
            line,
            ClusterJob(
                f"job-{line.number}",
                line.number_of("arrival"),
                steps,
                TableSpeed({count: rate for count, rate in known.items() if count <= workers}),
                {"gpu": 1},
                requested=workers,
                most=workers,
                utility=Constant(line.number_of("priority")),
                model=job_type,
            ),
        )
