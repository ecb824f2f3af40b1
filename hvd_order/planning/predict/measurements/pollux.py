"""Measurements of Pollux: steps of six applications on up to 16 nodes with 4 GPUs each.

Origin: petuum/adaptdl, branch osdi21-artifact, simulator/traces (Apache-2.0): PyTorch, T4 GPUs. A
folder an application, in it:

* ``placements.csv``: placement,local_bsz,step_time,sync_time. The placement 124 is one worker on a
  node, two on another and four on a third.
* ``scalability.csv``: num_nodes,num_replicas,local_bsz,step_time,sync_time.

Times are in seconds, of a step and of what of its exchange was not hidden behind computation;
``local_bsz`` is the batch of one worker.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from hvd_order.base.errors import InvalidUsage
from hvd_order.base.tables import Line, Path, read_header, read_lines

__all__ = ["Measured", "read_pollux"]

_FILES = ("placements.csv", "scalability.csv")


@dataclass(frozen=True)
class Measured:
    """One measurement.

    Attributes:
        nodes, workers: that the job had.
        batch: samples a step of one worker.
        step_s: time of a step.
        sync_s: part of it that waits for the exchange.
    """

    application: str
    nodes: int
    workers: int
    batch: int
    step_s: float
    sync_s: float

    @property
    def row(self) -> tuple[float, int, int, float]:
        """What ``fit_pollux`` and ``fit_ring`` read."""
        return float(self.batch), self.workers, self.nodes, self.step_s


def read_pollux(path: Path) -> dict[str, list[Measured]]:
    """Reads measurements by application.

    Args:
        path: the folder ``traces`` of the artifact, or one CSV file with a column ``application``
            and those of ``scalability.csv``.

    Raises:
        InvalidUsage: there are none, or a line is no measurement.
    """
    name = os.fspath(path)
    found: dict[str, list[Measured]] = {}
    if os.path.isdir(name):
        for application in sorted(os.listdir(name)):
            for file in _FILES:
                whole = os.path.join(name, application, file)
                if os.path.isfile(whole):
                    found.setdefault(application, []).extend(_read(whole, application))
        if not found:
            raise InvalidUsage(f"{name} has no APPLICATION/{_FILES[0]} or {_FILES[1]}")
        return found
    for each in _read(name, None):
        found.setdefault(each.application, []).append(each)
    return found


def _read(path: str, application: str | None) -> Iterator[Measured]:
    placed = "placement" in read_header(path)
    needed = ["placement"] if placed else ["num_nodes", "num_replicas"]
    if application is None:
        needed = ["application", *needed]
    for line in read_lines(path, [*needed, "local_bsz", "step_time", "sync_time"]):
        nodes, workers = _placement(line) if placed else (
            line.whole("num_nodes", 1), line.whole("num_replicas", 1)
        )  # fmt: skip
        if workers < nodes:
            raise line.wrong(f"{workers} workers on {nodes} nodes")
        yield Measured(
            application or line.text("application"),
            nodes,
            workers,
            line.whole("local_bsz", 1),
            line.number_of("step_time", above=0),
            line.number_of("sync_time"),
        )


def _placement(line: Line) -> tuple[int, int]:
    digits = line.text("placement")
    if not digits.isdecimal() or "0" in digits:
        raise line.wrong(f"placement is {digits!r}; expected a digit for each node, such as 124")
    return len(digits), sum(map(int, digits))
