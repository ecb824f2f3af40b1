"""Clipping, loss scaling, 16-bit weights and sharded optimizer state, in turns. See README.md."""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

from benchmarks.runner.cells.contestant import Contestant, compare
from benchmarks.runner.places import emulated_hosts
from benchmarks.runner.question import Answer, ask, option
from benchmarks.runner.records.summary import paired_ratio
from benchmarks.runner.workloads.build import size_bytes

_LOOP = {"max_norm": 1.0, "adamw": True}
_ENV = {"env": {"HVD_ORDER_TUNE": "0"}}
SYSTEMS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("ddp", {}),
    "hvd_order": ("hvd_order", _ENV),
    "hvd_order, scaled": ("hvd_order", {**_ENV, "scaled": True}),
    "sharded": ("sharded", _ENV),
    "ddp, bfloat16": ("ddp", {"bfloat16": True}),
    "sharded, bfloat16": ("sharded", {**_ENV, "bfloat16": True}),
}
"""The system of each, and what its loop has beside AdamW and clipping."""


def measure(options: argparse.Namespace) -> Answer:
    with emulated_hosts(options.hosts, options.rate_mbit) as place:
        wire_s = statistics.median(place.fleet().wire_s(size_bytes(options.model), rounds=3))
        contestants = []
        for name in options.systems:
            system, own = SYSTEMS[name]
            bucket = {"bucket_mib": options.bucket_mib} if system == "ddp" else {}
            contestants.append(Contestant(name, system, place.fleet(), {**_LOOP, **bucket, **own}))
        measured = compare(
            contestants, options.model, [options.ratio * wire_s] * options.hosts, first_steps=4,
            rounds=options.rounds, steps=options.steps, warm_up=2,
        )  # fmt: skip
        systems = {}
        for one in contestants:
            with one.fleet.awake():
                state = one.fleet("state_bytes", job=one.name)
            systems[one.name] = {**measured[one.name].to_json(), "state_bytes": state}
    summary = {"wire_s": wire_s, "systems": _summary(systems)}
    return Answer({"wire_s": wire_s, "systems": systems}, summary)


def _summary(systems: dict[str, Any]) -> dict[str, Any]:
    """Medians, and ratios to DDP with weights of the same kind."""
    found: dict[str, Any] = {}
    for name, one in systems.items():
        narrow = name.endswith("bfloat16")
        base = systems["ddp, bfloat16" if narrow else "ddp"]
        ratio = paired_ratio(one["seconds"], base["seconds"])
        found[name] = {
            "step_s": statistics.median(one["seconds"]),
            "of_ddp": ratio.median,
            "of_ddp_low": ratio.low,
            "of_ddp_high": ratio.high,
            "cpu_s": statistics.median(one["cpu_s"]),
            "sent_bytes": statistics.median(one["sent_bytes"]),
            "state_bytes": max(one["state_bytes"]),
            "state_of_ddp": max(one["state_bytes"]) / max(base["state_bytes"]),
        }
    return found


if __name__ == "__main__":
    sys.exit(ask(
        "sharded", __doc__, measure,
        option("--model", "resnet50", "an emulated one"),
        option("--hosts", 4),
        option("--rate-mbit", 1000.0),
        option("--ratio", 1.0, "computation over the communication of float32"),
        option("--systems", list(SYSTEMS), choices=list(SYSTEMS)),
        option("--bucket-mib", 2.0, "of DDP"),
        option("--rounds", 3),
        option("--steps", 5),
        on_hosts=True,
        quick={"hosts": 2, "rate_mbit": 4000.0, "rounds": 1, "steps": 2},
    ))  # fmt: skip
