"""Reads the measurements that Pollux' authors published.

petuum/adaptdl, branch osdi21-artifact, simulator/traces (Apache-2.0): PyTorch, nodes with 4
T4 GPUs. A folder an application with ``placements.csv`` (placement,local_bsz,step_time,sync_time;
the placement 124 is one worker on a node, two on another and four on a third) and
``scalability.csv`` (num_nodes,num_replicas,...).
"""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path

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
