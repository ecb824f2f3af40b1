"""``hvd-order cluster serve`` with ``--status``, ``--watch`` or ``--cancel``."""

from __future__ import annotations

import contextlib
import difflib
import json
import sys
import time
from pathlib import Path

from hvd_order.base.errors import InvalidUsage
from hvd_order.cluster.serve.requests import CancelRequests, is_served
from hvd_order.cluster.serve.status import read_status, status_table

__all__ = ["main"]

_WATCH_S = 1.0
_ANSWER_S = 5.0
_CLEAR = "\x1b[H\x1b[J"


def main(folder: Path, cancel: str | None, watch: bool, as_json: bool) -> int:
    """Shows the jobs of a scheduler, once or again and again, or takes one back.

    Returns:
        The exit code.

    Raises:
        InvalidUsage: no scheduler has used the folder, or it has no such job.
        OSError: a file cannot be read or written.
    """
    if cancel is not None:
        return _cancel(folder, cancel)
    if watch:
        with contextlib.suppress(KeyboardInterrupt):  # the way to end it
            _watch(folder)
        return 0
    status = read_status(folder)
    text = json.dumps(status, indent=1) + "\n" if as_json else status_table(
        status, is_served(folder)
    )  # fmt: skip
    sys.stdout.write(text)
    return 0


def _watch(folder: Path) -> None:
    shown = ""
    while True:
        runs = is_served(folder)
        text = status_table(read_status(folder), runs)
        if text != shown:
            sys.stdout.write((_CLEAR if sys.stdout.isatty() else "\n" if shown else "") + text)
            sys.stdout.flush()
            shown = text
        if not runs:
            return
        time.sleep(_WATCH_S)


def _cancel(folder: Path, name: str) -> int:
    jobs = {job["name"]: job["state"] for job in read_status(folder)["jobs"]}
    if name not in jobs:
        near = difflib.get_close_matches(name, jobs, 1)
        meant = f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(jobs) or 'none'}"
        raise InvalidUsage(f"the scheduler of {folder} has no job {name!r} (yet){meant}")
    if not is_served(folder):
        CancelRequests(folder).add(name)
        sys.stdout.write(f"no scheduler runs with {folder}; the next one cancels {name}\n")
        return 0
    request = CancelRequests(folder).add(name)
    until = time.monotonic() + _ANSWER_S
    while request.exists() and time.monotonic() < until:
        time.sleep(0.05)
    taken = not request.exists()
    sys.stdout.write(
        f"{name} stops at its next commit\n" if taken
        else f"{name} is to be cancelled, but the scheduler has not answered for {_ANSWER_S:g} s\n"
    )  # fmt: skip
    return 0
