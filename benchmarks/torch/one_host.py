"""Many ranks on one machine: what is left where processors are short? See README.md."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.runner.places import this_host
from benchmarks.runner.records.environment import ROOT, commit_of, started
from benchmarks.runner.records.record import add_out_option, settings_of, write_record
from benchmarks.runner.records.summary import paired_ratio
from benchmarks.runner.turns import Measured, measure_in_turns
from benchmarks.runner.workloads.real_models import REAL_MODELS

_WARM_UP = 3
_ONE_SLICE = {"HVD_ORDER_SLICE_BYTES": "25MiB", "HVD_ORDER_CREDIT_BYTES": "50MiB"}
SYSTEMS: dict[str, dict[str, str]] = {
    "ddp": {},
    "hvd_order": {},
    "before": {},
    "untuned": {"HVD_ORDER_TUNE": "0"},
    "one_slice": _ONE_SLICE,
    "one_slice_at_once": {**_ONE_SLICE, "HVD_ORDER_CROSS_ITERATION": "0"},
    "bypass": {
        "HVD_ORDER_SLICE_BYTES": "25MiB", "HVD_ORDER_CREDIT_BYTES": "1GiB",
        "HVD_ORDER_CROSS_ITERATION": "0", "HVD_ORDER_AGREEMENT": "planned",
        "HVD_ORDER_POLICY": "arrival",
    },
}  # fmt: skip
"""Knobs by system."""


def main() -> None:
    options = _options()
    found = started()
    raw, summaries = [], []
    for size in options.ranks:
        measured = _measure(size, options)
        systems = {}
        for name, one in measured.items():
            systems[name] = {**asdict(one), "seconds": one.turns}
            del systems[name]["turns"], systems[name]["sent_bytes"]
        raw.append({"ranks": size, "systems": systems})
        summaries.append({"ranks": size, "systems": _summary(measured)})
    settings = settings_of(options)
    if options.before:
        settings["before"] = commit_of(options.before)[0]
    write_record("one_host", found, settings, {"rows": raw}, {"rows": summaries}, options.out)


def _measure(size: int, options: argparse.Namespace) -> dict[str, Measured]:
    """Every system's steps, in turns; each has ranks of its own, asleep in the others' turns."""
    with this_host(size) as place:
        jobs, measured = {}, {}
        for name in options.systems:
            tree = options.before.resolve() if name == "before" else ROOT
            jobs[name] = fleet = place.fleet(tree=tree)
            with fleet.awake():
                fleet("build", job=name, system="ddp" if name == "ddp" else "hvd_order",
                      model=options.model, compute_s=[0.0] * size,
                      options={} if name == "ddp" else {"env": SYSTEMS[name]})  # fmt: skip
                measured[name] = Measured(fleet("settle", job=name, at_least=options.settle)[0])
        measure_in_turns(jobs, measured, options.rounds, options.steps, _WARM_UP)
        return measured


def _summary(measured: dict[str, Measured]) -> dict[str, Any]:
    """Medians, and the ratio of the medians of turns to DDP's, paired by turn."""
    turn_s = {name: [median(turn) for turn in one.turns] for name, one in measured.items()}
    return {
        name: {
            "step_s": median(turn_s[name]),
            "over_ddp": paired_ratio(turn_s[name], turn_s["ddp"]).to_json(),
            "cpu_s": median(one.cpu_s),
            "switches": median(one.switches),
            "messages": median(one.messages),
            "threads": one.threads,
            "note": one.note,
        }
        for name, one in measured.items()
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--model", choices=list(REAL_MODELS), default="linear8")
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS),
                        default=["ddp", "hvd_order"])  # fmt: skip
    parser.add_argument("--rounds", type=int, default=8, help="turns of each system")
    parser.add_argument("--steps", type=int, default=30, help="measured steps in each turn")
    parser.add_argument("--settle", type=int, default=5, help="least number of steps before")
    parser.add_argument("--before", type=Path, metavar="TREE", help="checkout for 'before'")
    add_out_option(parser)
    options = parser.parse_args()
    if "ddp" not in options.systems:
        parser.error("the ratios are to DDP: name ddp among --systems")
    if ("before" in options.systems) != (options.before is not None):
        parser.error("'before' and --before go together")
    return options


if __name__ == "__main__":
    sys.exit(main())
