"""What the account of steps costs: steps with and without it, in turns. See README.md."""

from __future__ import annotations

import argparse
import statistics
import sys

from benchmarks.runner.cells.contestant import Contestant, compare
from benchmarks.runner.places import emulated_hosts
from benchmarks.runner.question import Answer, ask, option
from benchmarks.runner.records.summary import paired_ratio
from benchmarks.runner.workloads.build import size_bytes

_WITH, _WITHOUT = "with", "without"
_ENVIRONMENTS = {_WITH: {}, _WITHOUT: {"HVD_ORDER_DEBUG": "no_account"}}


def measure(options: argparse.Namespace) -> Answer:
    with emulated_hosts(options.hosts, options.rate_mbit) as place:
        wire_s = statistics.median(place.fleet().wire_s(size_bytes(options.model), rounds=3))
        contestants = [
            Contestant(name, "hvd_order", place.fleet(), {"env": {"HVD_ORDER_TUNE": "0", **env}})
            for name, env in _ENVIRONMENTS.items()
        ]
        measured = compare(
            contestants, options.model, [options.ratio * wire_s] * options.hosts, first_steps=4,
            rounds=options.rounds, steps=options.steps, warm_up=2,
        )  # fmt: skip
    seconds = {name: each.to_json()["seconds"] for name, each in measured.items()}
    ratio = paired_ratio(seconds[_WITH], seconds[_WITHOUT])
    print(
        f"{options.model}, {options.hosts} hosts: a step takes "
        f"{statistics.median(seconds[_WITHOUT]):.4f} s without the account, {ratio.median:.4f} of "
        f"that with it ({ratio.low:.4f} to {ratio.high:.4f})"
    )
    return Answer(
        {"wire_s": wire_s, "systems": {name: each.to_json() for name, each in measured.items()}},
        {"ratio": ratio.median, "low": ratio.low, "high": ratio.high},
    )


if __name__ == "__main__":
    sys.exit(ask(
        "account_cost", __doc__, measure,
        option("--model", "resnet50", "an emulated one"),
        option("--hosts", 2),
        option("--rate-mbit", 1000.0),
        option("--ratio", 1.0, "computation over communication"),
        option("--rounds", 10),
        option("--steps", 20),
        on_hosts=True,
        quick={"rate_mbit": 4000.0, "rounds": 1, "steps": 10},
    ))  # fmt: skip
