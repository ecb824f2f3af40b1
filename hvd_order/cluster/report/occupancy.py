"""Who used which machine when, from a file of placements, in bounded memory."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvd_order.cluster.model.machines import Machines

__all__ = ["Bar", "Occupancy", "main_resources", "read_occupancy", "span_of"]

_COLUMNS = 1000  # of time: about as many as a picture has pixels
_MOST_BARS = 30_000
_CHUNK = 20_000  # rows


class Bar(NamedTuple):
    """A time in which a job used an amount of the main resource of a machine."""

    machine: int
    job: str
    begin_s: float
    end_s: float
    amount: float


@dataclass(frozen=True)
class Occupancy:
    """Use of machines over time.

    Attributes:
        begin_s, end_s: of the time that the columns cover, each an equal part.
        bars: None: there are too many to show each.
        shares: part of a machine's main resource in use, machines by columns.
        use: part of all machines' amount in use, by resource and column.
    """

    begin_s: float
    end_s: float
    bars: list[Bar] | None
    shares: NDArray[np.float64]
    use: dict[str, NDArray[np.float64]]


def main_resources(machines: Machines) -> list[str]:
    """For each machine the resource whose use is shown: ``gpu``, where it has none the first."""
    return [
        "gpu" if m.capacity.get("gpu", 0) > 0
        else next((name for name, amount in m.capacity.items() if amount > 0), "")
        for m in machines.machines
    ]  # fmt: skip


def span_of(paths: Iterable[Path]) -> tuple[float, float]:
    """First begin and last end of all placements of the files; (0, 0) if there are none."""
    first, last = math.inf, -math.inf
    for path in paths:
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                first, last = min(first, float(row["begin_s"])), max(last, float(row["end_s"]))
    return (first, last) if first < last else (0.0, 0.0)


def read_occupancy(path: Path, machines: Machines, span: tuple[float, float]) -> Occupancy:
    """Reads a run's file of placements.

    Args:
        span: as of `span_of`.
    """
    begin_s, end_s = span
    places = {machine.name: i for i, machine in enumerate(machines.machines)}
    resources = machines.resources
    main = [resources.index(name) if name else 0 for name in main_resources(machines)]
    # Steps of use, as differences between columns; their sums from the left are the use.
    by_machine = np.zeros((len(machines), _COLUMNS + 2))
    by_resource = np.zeros((len(resources), _COLUMNS + 2))
    bars: list[Bar] | None = []
    scale = _COLUMNS / (end_s - begin_s) if end_s > begin_s else 0.0
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.reader(file)
        next(reader)
        for rows in _chunks(reader):
            where = np.array([places[row[1]] for row in rows])
            times = (np.array([row[2:4] for row in rows], dtype=np.float64) - begin_s) * scale
            amounts = np.array([row[6:] for row in rows], dtype=np.float64)
            shown = amounts[np.arange(len(rows)), np.array(main)[where]]
            for at, sign in ((times[:, 0], 1.0), (times[:, 1], -1.0)):
                column = np.minimum(at.astype(np.int64), _COLUMNS)
                late = at - column
                for later, part in ((0, 1.0 - late), (1, late)):
                    np.add.at(by_machine, (where, column + later), sign * part * shown)
                    for number in range(len(resources)):
                        np.add.at(by_resource[number], column + later,
                                  sign * part * amounts[:, number])  # fmt: skip
            if bars is not None:
                bars += [
                    Bar(int(m), row[0], float(row[2]), float(row[3]), amount)
                    for m, row, amount in zip(where, rows, shown.tolist(), strict=True)
                    if amount > 0
                ]
                bars = bars if len(bars) <= _MOST_BARS else None
    capacity = machines.capacity[np.arange(len(machines)), main]
    total = machines.capacity.sum(axis=0)
    use = {
        name: np.cumsum(by_resource[number])[:_COLUMNS] / total[number]
        for number, name in enumerate(resources)
        if total[number] > 0
    }
    shares = np.cumsum(by_machine, axis=1)[:, :_COLUMNS] / np.maximum(capacity, 1e-300)[:, None]
    return Occupancy(begin_s, end_s, bars, shares, use)


def _chunks(rows: Iterator[list[str]]) -> Iterator[list[list[str]]]:
    while chunk := list(islice(rows, _CHUNK)):
        yield chunk
