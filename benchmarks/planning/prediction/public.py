"""How far are formulas from the measurements that others published?

Fits from few points and predicts the others. Pollux' measurements: the excerpt that is shipped, or
all of them with --pollux DIR (simulator/traces of petuum/adaptdl, branch osdi21-artifact). DL2's:
with --dl2 FILE (config_speed.txt of pengyanghua/DL2; it has no licence and is not shipped). The
result file has Pollux' errors.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.planning.prediction.published import Row, ServerMeasurement, read_dl2, read_pollux
from benchmarks.runner.records.environment import started
from benchmarks.runner.records.record import add_out_option, write_record
from benchmarks.runner.records.report import table
from hvd_order.cluster.workloads.load import DATA
from hvd_order.planning.predict.measurements.ring import Ring
from hvd_order.planning.predict.workers.fit import fit_optimus_sync, fit_pollux, fit_step_time

_POINTS = 8  # of DL2's, as Optimus collects

# Medians in %, measured before with the whole data: Pollux' linear term, and the volume of a ring
# without shared links. Of some only the range over all applications was kept.
_KNOWN = {
    "1-4 -> 6-16": ("3.8-14.1", {}, "4.9-12.6"),
    "1-2 -> 6-16": ("78-197", {"imagenet": 8.1, "cifar10": 9.9, "deepspeech2": 15.3,
                               "yolov3": 36.0, "bert": 46.0, "ncf": 61.0}, ""),
}  # fmt: skip
_SPLITS = {"1-4 -> 6-16": (4, 6), "1-2 -> 6-16": (2, 6), "1-2 -> 3-4": (2, 3), "1-3 -> 4": (3, 4)}


# Steps' absolute relative errors, by application, by _SPLITS, by form.
Errors = dict[str, dict[str, dict[str, list[float]]]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_out_option(parser)
    parser.add_argument(
        "--pollux", metavar="PATH", type=Path, help="default: the excerpt that is shipped"
    )
    parser.add_argument("--dl2", metavar="FILE", type=Path)
    parser.add_argument("--seeds", type=int, default=20, help="choices of DL2's points")
    options = parser.parse_args()
    found = started()
    shipped = Path(DATA, "pollux-measurements.csv")
    errors: Errors = {}
    rows = []
    for application, measured in read_pollux(options.pollux or shipped).items():
        errors[application] = {}
        for split in _SPLITS:
            if points := _points(measured, split):
                errors[application][split] = _pollux_errors(*points)
                rows.append(_pollux_row(application, split, points, errors[application][split]))
    print("Pollux: errors in %, median / 90 %; numbers of nodes\n")
    print(table(("application", "fit -> predict", "points", "Pollux", "ring, shared link",
                 "before: Pollux", "before: ring"), rows))  # fmt: skip
    if options.dl2:
        print(f"\nDL2, synchronous: errors in % of Optimus' formula, fitted to {_POINTS} points; "
              "before: median 3.4 to 11.2, 90 % 14 to 36\n")  # fmt: skip
        print(table(("model", "batch", "points", "median / 90 %"),
                    _dl2_rows(list(read_dl2(options.dl2)), options.seeds)))  # fmt: skip
    settings = {"pollux": (options.pollux or shipped).name}
    write_record("prediction", found, settings, {"published": errors}, {}, options.out)
    return 0


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


def _pollux_row(
    application: str,
    split: str,
    points: tuple[Sequence[Row], Sequence[Row]],
    errors: dict[str, list[float]],
) -> list[str]:
    linear, by_application, ring = _KNOWN.get(split, ("", {}, ""))
    before = str(by_application.get(application, ring))
    counts = " -> ".join(str(len(each)) for each in points)
    return [application, split, counts, *map(_percent, errors.values()), linear, before]


def _percent(errors: Sequence[float]) -> str:
    return f"{100 * np.median(errors):.1f} / {100 * np.quantile(errors, 0.9):.0f}"


def _dl2_rows(measured: Sequence[ServerMeasurement], seeds: int) -> list[list[str]]:
    groups: dict[tuple[str, int], list[ServerMeasurement]] = defaultdict(list)
    for each in measured:
        if each.synchronous:
            groups[each.model, each.batch].append(each)
    rows = []
    for (model, batch), all_ in sorted(groups.items()):
        if len(all_) <= _POINTS:
            continue
        errors: list[float] = []
        for seed in range(seeds):
            few = random.Random(seed).sample(all_, _POINTS)
            formula = fit_optimus_sync(
                [(m.workers, m.servers, batch, m.samples_per_s / batch) for m in few]
            )
            errors += [
                abs(batch * formula.steps_per_s(m.workers, m.servers, batch) / m.samples_per_s - 1)
                for m in all_
                if m not in few
            ]
        rows.append([model, str(batch), str(len(all_)), _percent(errors)])
    return rows


if __name__ == "__main__":
    sys.exit(main())
