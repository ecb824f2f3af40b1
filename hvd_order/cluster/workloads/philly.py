"""The flat table of Microsoft's Philly trace: timestamp,duration,num_gpus,gpu_time,cluster.

Origin: made for Pollux (petuum/adaptdl, branch osdi21-artifact, simulator/traces/philly.csv) from
msr-fiddle/philly-traces (data CC-BY-4.0; Jeon et al., USENIX ATC 2019). Timestamps are such as
``2017-11-08 08:16:51``; durations are in seconds. Read: timestamp, duration, num_gpus, cluster,
which becomes the job's model.

Lines are in no order, so their numbers are held in memory, 82,000 of them in some 10 MB, and
sorted. Lines of jobs that ran for no time, or without GPUs, are left out.
"""

from __future__ import annotations

import os
from datetime import datetime

from hvd_order.base.tables import Path, TableRow, read_lines
from hvd_order.cluster.workloads.numbered import Numbered, timed_job

__all__ = ["COLUMNS", "read_philly"]

COLUMNS = ("timestamp", "duration", "num_gpus", "cluster")


def read_philly(path: Path) -> Numbered:
    """Reads the jobs; ``timed_job`` says what is assumed of them.

    Arrivals count from the first job's.

    Raises:
        InvalidUsage: a line is no job.
    """
    rows: list[tuple[float, int, float, int, str]] = []
    for line in read_lines(path, COLUMNS):
        duration_s, gpus = line.number_of("duration"), line.whole("num_gpus")
        if duration_s > 0 and gpus > 0:
            rows.append((_seconds(line), line.number, duration_s, gpus, line.text("cluster")))
    rows.sort()
    for at_s, number, duration_s, gpus, cluster in rows:
        line = TableRow(os.fspath(path), number, {})
        yield (
            line,
            timed_job(
                line, f"philly-{number}", at_s - rows[0][0], duration_s, gpus, {"gpu": 1}, cluster
            ),
        )


def _seconds(line: TableRow) -> float:
    text = line.text("timestamp")
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise line.wrong(f"timestamp is {text!r}; expected one such as "
                         "2017-11-08 08:16:51") from None  # fmt: skip
    return (found.replace(tzinfo=None) - datetime(2000, 1, 1)).total_seconds()
