"""Reads the measurements that others published.

Pollux: petuum/adaptdl, branch osdi21-artifact, simulator/traces (Apache-2.0): PyTorch, nodes with 4
T4 GPUs. A folder an application with ``placements.csv`` (placement,local_bsz,step_time,sync_time;
the placement 124 is one worker on a node, two on another and four on a third) and
``scalability.csv`` (num_nodes,num_replicas,...).

DL2: pengyanghua/DL2, ``config_speed.txt`` (no licence, so nothing of it is shipped): MXNet. Each
line is a tuple:

    (model, 'dist_sync' or 'dist_async', batch of all workers, servers, workers, [speeds],
     [processors of each server], [processors of each worker])

The speeds are samples/s of each worker: those of one line differ as the shares of the batch do,
which is how the unit was inferred. Nine lines have speeds of 0: nothing was measured there.
"""

from __future__ import annotations

import ast
import csv
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Row", "ServerMeasurement", "read_dl2", "read_pollux"]

Row = tuple[float, int, int, float]
"""Samples a step of one worker, workers, nodes, seconds of a step."""


def read_pollux(path: Path) -> dict[str, list[Row]]:
    """Measurements by application, from the folder or a table with a column ``application``."""
    found: defaultdict[str, list[Row]] = defaultdict(list)
    names = ("placements.csv", "scalability.csv")
    files = [path] if path.is_file() else [f for f in sorted(path.glob("*/*")) if f.name in names]
    for file in files:
        with file.open(encoding="utf-8", newline="") as text:
            for line in csv.DictReader(text):
                if placement := line.get("placement"):
                    nodes, workers = len(placement), sum(map(int, placement))
                else:
                    nodes, workers = int(line["num_nodes"]), int(line["num_replicas"])
                row = float(line["local_bsz"]), workers, nodes, float(line["step_time"])
                found[line.get("application") or file.parent.name].append(row)
    return found


@dataclass(frozen=True)
class ServerMeasurement:
    """A measurement of a parameter-server job; batch and speed are of all workers."""

    model: str
    synchronous: bool
    batch: int
    servers: int
    workers: int
    samples_per_s: float


def read_dl2(path: Path) -> Iterator[ServerMeasurement]:
    """Measurements line by line, without those that measured nothing."""
    for text in path.read_text("utf-8").splitlines():
        if text.strip():
            model, mode, batch, servers, workers, speeds, *_ = ast.literal_eval(text.strip())
            if sum(speeds) > 0:
                yield ServerMeasurement(
                    model, mode == "dist_sync", batch, servers, workers, sum(speeds)
                )
