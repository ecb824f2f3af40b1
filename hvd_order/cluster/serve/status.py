"""What users read: the status of all jobs, and the outcomes as CSV."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hvd_order.base.errors import InvalidUsage
from hvd_order.cluster.simulate.outcome import JOB_COLUMNS, JobOutcome

__all__ = [
    "ShownJob",
    "last_lines",
    "read_status",
    "status_table",
    "write_outcomes",
    "write_status",
]

_TAIL_BYTES = 4096


@dataclass(frozen=True)
class ShownJob:
    """A job as users see it.

    Attributes:
        state: what its processes do, or how it has ended.
        slots: workers by host that it was given last.
        here_s: seconds since its arrival; None: it has ended.
        done: estimated share of its work, 0 to 1; None: it has ended.
    """

    name: str
    state: str
    slots: Mapping[str, int] = field(default_factory=dict)
    here_s: float | None = None
    done: float | None = None
    failures: int = 0


def write_status(folder: Path, slots: Mapping[str, int], jobs: Sequence[ShownJob]) -> None:
    """Replaces the file of the status.

    Args:
        slots: of all hosts.

    Raises:
        OSError: it cannot be written.
    """
    status = {"slots": dict(slots), "jobs": [asdict(job) for job in jobs]}
    _replace_file(folder / "status.json", json.dumps(status, indent=1) + "\n")


def read_status(folder: Path) -> dict[str, Any]:
    """What `write_status` has written.

    Raises:
        InvalidUsage: no scheduler has used the folder.
        OSError: the file cannot be read.
    """
    try:
        status: dict[str, Any] = json.loads((folder / "status.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidUsage(f"{folder} has no status.json, so no scheduler has used it; name the "
                           "folder of one: --state DIR") from None  # fmt: skip
    return status


def status_table(status: Mapping[str, Any], runs: bool) -> str:
    """The status as text.

    Args:
        status: from `read_status`.
        runs: whether a scheduler runs.
    """
    used = dict.fromkeys(status["slots"], 0)
    rows = [("job", "state", "slots", "s since arrival", "done (estimate)", "failures")]
    for each in status["jobs"]:
        job = ShownJob(**each)
        for host, count in job.slots.items():
            used[host] += count
        rows.append((
            job.name, job.state, " ".join(f"{m}:{n}" for m, n in job.slots.items()) or "-",
            "-" if job.here_s is None else f"{job.here_s:.0f}",
            "-" if job.done is None else f"{job.done:.0%}", str(job.failures),
        ))  # fmt: skip
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    hosts = ", ".join(f"{host} {used[host]} of {count}" for host, count in status["slots"].items())
    whose = "" if runs else "; no scheduler runs, so nothing changes"
    return "\n".join([f"slots in use: {hosts}{whose}", *lines]) + "\n"


def write_outcomes(path: Path, outcomes: Sequence[JobOutcome]) -> None:
    """Replaces the file of outcomes; columns are those of simulated runs, times in seconds.

    Raises:
        OSError: it cannot be written.
    """
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(JOB_COLUMNS)
    rows.writerows(outcome.row() for outcome in outcomes)
    _replace_file(path, text.getvalue())


def _replace_file(path: Path, text: str) -> None:
    """Writes a file that nobody ever sees in part.

    Raises:
        OSError: it cannot be written.
    """
    draft = path.with_name(path.name + ".part")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)


def last_lines(path: Path, count: int) -> list[str]:
    """The end of a log; empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()[-count:]
    except OSError:
        return []
