"""``hvd-order doctor --job``: where each rank of a running job is, and where they differ."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hvd_order.watch.cli.words import counted

if TYPE_CHECKING:
    from hvd_order.watch.channel.notes import JobNote, PlaceNote

__all__ = ["main"]

_PY_SPY_S = 30.0


def main(named: str, timeout_s: float, as_json: bool) -> int:
    """Asks all ranks, and prints what they say.

    Args:
        named: as in `hvd_order.watch.channel.reader.find_job`.
        timeout_s: for the ranks' answers.

    Returns:
        0 if all ranks have answered, else 1.
    """
    from hvd_order.watch.channel.reader import find_job

    view = find_job(named)
    job = view.job()
    places = view.places(len(job.hosts), timeout_s)
    silent = {
        rank: _look_from_outside(job, rank) for rank in range(len(job.hosts)) if rank not in places
    }
    if as_json:
        document = _document(view.address, job, places, silent)
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    else:
        sys.stdout.write(_text(view.address, job, places, silent, timeout_s))
    return 1 if silent else 0


def _look_from_outside(job: JobNote, rank: int) -> str:
    """Where a rank is that does not answer: by py-spy, or how to find out."""
    host, process = job.hosts[rank], job.processes[rank]
    command = f"py-spy dump --pid {process}"
    if host != socket.gethostname():
        return f"run on {host}: {command}   (pip install py-spy)"
    program = shutil.which("py-spy")
    if program is None:
        return f"pip install py-spy, then: {command}"
    try:
        done = subprocess.run(
            [program, *command.split()[1:]], capture_output=True, text=True, timeout=_PY_SPY_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command} failed: {error}"
    return done.stdout if done.returncode == 0 else f"{command} failed: {done.stderr.strip()}"


def _document(
    address: str, job: JobNote, places: Mapping[int, PlaceNote], silent: Mapping[int, str]
) -> dict[str, Any]:
    return {
        "store": address,
        "ranks": {
            str(rank): {
                "host": job.hosts[rank],
                "process": job.processes[rank],
                "answered": rank in places,
                **(places[rank].content() if rank in places else {"seen": silent[rank]}),
            }
            for rank in range(len(job.hosts))
        },
    }


def _text(
    address: str,
    job: JobNote,
    places: Mapping[int, PlaceNote],
    silent: Mapping[int, str],
    timeout_s: float,
) -> str:
    ranks, hosts = counted(len(job.hosts), "rank"), counted(len(set(job.hosts)), "host")
    lines = [f"job at {address}: {ranks} on {hosts}", ""]
    lines += _summary(places, silent)
    for rank in range(len(job.hosts)):
        lines += ["", f"rank {rank} on {job.hosts[rank]}, process {job.processes[rank]}:"]
        place = places.get(rank)
        if place is None:
            lines.append(
                f"  no answer within {timeout_s:g} s: it has ended or is stopped, or native code "
                "holds the interpreter"
            )
            lines += [f"  {line}" for line in silent[rank].splitlines()]
            continue
        lines += [f"  it {place.waits}"] if place.waits else []
        for name, frames in place.stacks.items():
            if name.startswith("hvd_order"):  # its own wait all the time; --json has them
                continue
            lines += [f"  thread {name}", *(f"    {frame}" for frame in reversed(frames))]
    return "\n".join(lines) + "\n"


def _summary(places: Mapping[int, PlaceNote], silent: Mapping[int, str]) -> list[str]:
    """One line for each place where ranks are, the most ranks first: the odd one stands out."""
    at: dict[str, list[int]] = {}
    for rank, place in sorted(places.items()):
        at.setdefault(_where(place), []).append(rank)
    if silent:
        at["give no answer"] = sorted(silent)
    groups = sorted(at.items(), key=lambda item: -len(item[1]))
    lines = [f"{_named(ranks)}: {where}" for where, ranks in groups]
    waiting = {rank for rank, place in places.items() if place.waits}
    others = sorted({*places, *silent} - waiting)
    if waiting and others:
        lines.append(f"The others may wait for {_named(others)}: look there first.")
    return lines


def _where(place: PlaceNote) -> str:
    return f"{place.at}, and {place.waits}" if place.waits else place.at


def _named(ranks: list[int]) -> str:
    """Ranks as text: [0, 1, 2, 5] is "ranks 0-2, 5"."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][-1] == rank - 1:
            spans[-1] = [spans[-1][0], rank]
        else:
            spans.append([rank])
    text = ", ".join("-".join(str(each) for each in span) for span in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
