"""How far are formulas from the measurements that Pollux' authors published?

Fits from few points and predicts the others: the excerpt that is shipped, or all of them with
--pollux DIR (simulator/traces of petuum/adaptdl, branch osdi21-artifact).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.planning.prediction.published import Row, read_pollux
from benchmarks.runner.question import Answer, ask, option
from benchmarks.runner.records.report import table
from hvd_order.cluster.workloads.load import DATA
from hvd_order.planning.predict.measurements.ring import Ring
from hvd_order.planning.predict.workers.fit import fit_pollux, fit_step_time

_SPLITS = {"1-4 -> 6-16": (4, 6), "1-2 -> 6-16": (2, 6), "1-2 -> 3-4": (2, 3), "1-3 -> 4": (3, 4)}


# Steps' absolute relative errors, by application, by _SPLITS, by form.
Errors = dict[str, dict[str, dict[str, list[float]]]]


def measure(options: argparse.Namespace) -> Answer:
    errors: Errors = {}
    rows = []
    for application, measured in read_pollux(options.pollux).items():
        errors[application] = {}
        for split in _SPLITS:
            if points := _points(measured, split):
                found = errors[application][split] = _pollux_errors(*points)
                counts = " -> ".join(str(len(each)) for each in points)
                rows.append([application, split, counts, *map(_percent, found.values())])
    print("Pollux: errors in %, median / 90 %; numbers of nodes\n")
    header = ("application", "fit -> predict", "points", "Pollux", "ring, shared link")
    print(*table(header, rows), sep="\n")
    return Answer({"published": errors}, settings={"pollux": options.pollux.name},
                  name="prediction-public")  # fmt: skip


def _points(measured: Sequence[Row], split: str) -> tuple[list[Row], list[Row]] | None:
    """What is fitted to and what is predicted; None: too little of either."""
    most, least = _SPLITS[split]
    upper = most + 2 if least < 6 else 1 << 30
    few = [row for row in measured if row[2] <= most]
    rest = [row for row in measured if least <= row[2] <= upper]
    return (few, rest) if rest and any(workers == 1 for _, workers, _, _ in few) else None


def _pollux_errors(few: Sequence[Row], rest: Sequence[Row]) -> dict[str, list[float]]:
    return {
        form: [
            abs(formula.step_s(batch, workers, nodes) / step_s - 1)
            for batch, workers, nodes, step_s in rest
        ]
        for form, formula in (
            ("Pollux", fit_pollux(few)),
            ("shared link", fit_step_time(Ring, few)),
        )
    }


def _percent(errors: Sequence[float]) -> str:
    return f"{100 * np.median(errors):.1f} / {100 * np.quantile(errors, 0.9):.0f}"


if __name__ == "__main__":
    sys.exit(ask(
        "prediction", __doc__, measure,
        option("--pollux", Path(DATA, "pollux-measurements.csv"), metavar="PATH"),
        quick={},
    ))  # fmt: skip
