"""Many ranks on one machine: what is left where processors are short? See README.md."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.runner.cells.contestant import VARIANTS, Contestant, compare
from benchmarks.runner.places import this_host
from benchmarks.runner.question import Answer, ask, option
from benchmarks.runner.records.environment import commit_of
from benchmarks.runner.records.summary import paired_ratio
from benchmarks.runner.turns import Measured
from benchmarks.runner.workloads.real_models import REAL_MODELS


def measure(options: argparse.Namespace) -> Answer:
    raw, summaries = [], []
    for size in options.ranks:
        with this_host(size) as place:
            contestants = [
                Contestant(name, name, place.fleet()) if name == "ddp"
                else Contestant.variant(name, place, {}, options.before)
                for name in options.systems
            ]  # fmt: skip
            measured = compare(
                contestants, options.model, [0.0] * size, first_steps=options.settle,
                rounds=options.rounds, steps=options.steps, warm_up=3,
            )  # fmt: skip
        systems = {}
        for name, one in measured.items():
            systems[name] = {**asdict(one), "seconds": one.turns}
            del systems[name]["turns"], systems[name]["sent_bytes"]
        raw.append({"ranks": size, "systems": systems})
        summaries.append({"ranks": size, "systems": _summary(measured)})
    before = {"before": commit_of(options.before)[0]} if options.before else {}
    return Answer({"rows": raw}, {"rows": summaries}, before)


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


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if "ddp" not in options.systems:
        parser.error("the ratios are to DDP: name ddp among --systems")
    if ("before" in options.systems) != (options.before is not None):
        parser.error("'before' and --before go together")


if __name__ == "__main__":
    sys.exit(ask(
        "one_host", __doc__, measure,
        option("--ranks", [2, 4, 8, 16]),
        option("--model", "linear8", choices=list(REAL_MODELS)),
        option("--systems", ["ddp", "hvd_order"], choices=["ddp", *VARIANTS]),
        option("--rounds", 8, "turns of each system"),
        option("--steps", 30, "measured steps in each turn"),
        option("--settle", 5, "least number of steps before"),
        option("--before", None, "checkout for 'before'", type=Path, metavar="TREE"),
        check=_check, quick={"ranks": [2], "rounds": 2, "steps": 5},
    ))  # fmt: skip
