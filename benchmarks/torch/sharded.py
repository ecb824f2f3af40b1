"""Clipping, loss scaling, 16-bit weights and sharded optimizer state, in turns. See README.md."""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from benchmarks.runner.places import emulated_hosts
from benchmarks.runner.records.environment import started
from benchmarks.runner.records.record import add_out_option, settings_of, write_record
from benchmarks.runner.records.summary import paired_ratio
from benchmarks.runner.turns import Measured, measure_in_turns
from benchmarks.runner.workloads.build import size_bytes

_FIRST_STEPS = 4
_WARM_UP = 2
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


def main() -> None:
    options = _options()
    found = started()
    measured = _measure(options)
    summary = _summary(measured)
    write_record("sharded", found, settings_of(options), measured, summary, options.out)


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    """Every system's steps, in turns; each has ranks of its own, asleep in the others' turns."""
    with emulated_hosts(options.hosts, options.rate_mbit) as place:
        first = place.fleet()
        with first.awake():
            times = first("wire", size_bytes=size_bytes(options.model), rounds=3)
        wire_s = statistics.median(max(seconds) for seconds in zip(*times, strict=True))
        jobs, measured, state = {}, {}, {}
        for name in options.systems:
            system, own = SYSTEMS[name]
            bucket = {"bucket_mib": options.bucket_mib} if system == "ddp" else {}
            jobs[name] = fleet = place.fleet()
            with fleet.awake():
                fleet("build", job=name, system=system, model=options.model,
                      compute_s=[options.ratio * wire_s] * options.hosts,
                      options={**_LOOP, **bucket, **own})  # fmt: skip
                measured[name] = Measured(fleet("settle", job=name, at_least=_FIRST_STEPS)[0])
                state[name] = fleet("state_bytes", job=name)
        measure_in_turns(jobs, measured, options.rounds, options.steps, _WARM_UP)
    systems = {name: {**one.to_json(), "state_bytes": state[name]}
               for name, one in measured.items()}  # fmt: skip
    return {"wire_s": wire_s, "systems": systems}


def _summary(measured: dict[str, Any]) -> dict[str, Any]:
    systems = measured["systems"]
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
    return {"wire_s": measured["wire_s"], "systems": found}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="resnet50", help="an emulated one")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate-mbit", type=float, default=1000.0)
    parser.add_argument("--ratio", type=float, default=1.0,
                        help="computation over the communication of float32")  # fmt: skip
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--bucket-mib", type=float, default=2.0, help="of DDP")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    add_out_option(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
