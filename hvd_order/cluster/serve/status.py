"""What users read: a table of all jobs, and the outcomes as CSV."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from pathlib import Path

from hvd_order.cluster.simulate.outcome import JOB_COLUMNS, JobOutcome

__all__ = ["last_lines", "replace_file", "table", "write_outcomes"]

_TAIL_BYTES = 4096


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need."""
    lines = [header, *rows]
    widths = [max(len(line[k]) for line in lines) for k in range(len(header))]
    return "".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        + "\n"
        for line in lines
    )


def write_outcomes(path: Path, outcomes: Sequence[JobOutcome]) -> None:
    """Replaces the file of outcomes; columns are those of simulated runs, times in seconds.

    Raises:
        OSError: it cannot be written.
    """
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(JOB_COLUMNS)
    rows.writerows(outcome.row() for outcome in outcomes)
    replace_file(path, text.getvalue())


def replace_file(path: Path, text: str) -> None:
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
