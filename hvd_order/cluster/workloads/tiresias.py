"""Traces of Tiresias: job_id,num_gpu,submit_time,iterations,model_name,duration,interval.

Origin: SymbioticLab/Tiresias, simulator/60_job.csv (Gu et al., "Tiresias", NSDI 2019). Times are in
seconds. Read: job_id, num_gpu, submit_time, duration, model_name. ``iterations`` and ``interval``
are not: the duration holds what they say.
"""

from __future__ import annotations

from hvd_order.base.tables import Path, read_lines
from hvd_order.cluster.workloads.numbered import Numbered, timed_job

__all__ = ["COLUMNS", "read_tiresias"]

COLUMNS = ("job_id", "num_gpu", "submit_time", "model_name", "duration")


def read_tiresias(path: Path) -> Numbered:
    """Reads the jobs; ``timed_job`` says what is assumed of them.

    Raises:
        InvalidUsage: a line is no job.
    """
    for line in read_lines(path, COLUMNS):
        yield (
            line,
            timed_job(
                line,
                f"job-{line.text('job_id')}",
                line.number_of("submit_time"),
                line.number_of("duration", above=0),
                line.whole("num_gpu", 1),
                {"gpu": 1},
                line.text("model_name"),
            ),
        )
