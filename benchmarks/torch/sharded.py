"""Clipping, loss scaling, 16-bit weights and sharded optimizer state, in turns. See README.md."""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
from typing import Any, TextIO

from benchmarks.hosts import EmulatedHosts
from benchmarks.runner.commands import step_s
from benchmarks.runner.fleet import Fleet
from benchmarks.runner.records.environment import describe, environment
from benchmarks.runner.records.record import add_out_option, settings_of, write_record
from benchmarks.runner.records.report import table
from benchmarks.runner.records.summary import paired_ratio
from benchmarks.runner.turns import turns
from benchmarks.runner.workloads.workloads import size_bytes

_FIRST_STEPS = 4
_WARM_UP = 2
_NORM = 1.0
SYSTEMS: dict[str, dict[str, Any]] = {
    "ddp": {"system": "ddp"},
    "hvd_order": {"system": "hvd_order"},
    "hvd_order, scaled": {"system": "hvd_order", "scaler": True},
    "sharded": {"system": "sharded"},
    "ddp, bfloat16": {"system": "ddp", "bfloat16": True},
    "sharded, bfloat16": {"system": "sharded", "bfloat16": True},
}
"""Options of each loop (language_loops.py)."""


def main() -> None:
    options = _options()
    found = environment()
    print(describe(found) + "\n", flush=True)
    with tempfile.NamedTemporaryFile(
        "w+", prefix="hvd_order_bench_", suffix=".log", delete=False
    ) as log:
        measured = _measure(options, log)
    summary = _summary(measured)
    print(_table(summary))
    write_record("sharded", found, settings_of(options), measured, summary, options.out)


def _measure(options: argparse.Namespace, log: TextIO) -> dict[str, Any]:
    """Every system's steps, in turns; each has ranks of its own, asleep in the others' turns."""
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(EmulatedHosts(count=options.hosts, rate_mbit=options.rate_mbit))
        ranks = [hosts.rank_environment(rank) for rank in range(options.hosts)]
        first = Fleet(hosts, "torch", log, ranks, restless=True)
        stack.callback(first.close)
        wire_s = statistics.median(
            max(seconds)
            for seconds in zip(
                *first("wire", size_bytes=size_bytes(options.model), rounds=3), strict=True
            )
        )
        first.sleep()
        fleets: dict[str, Fleet] = {}
        measured: dict[str, Any] = {}
        for number, name in enumerate(options.systems, start=1):
            port = str(int(ranks[0]["MASTER_PORT"]) + 100 * number)
            env = [{**each, "MASTER_PORT": port} for each in ranks]
            fleet = Fleet(hosts, "torch", log, env, restless=True)
            stack.callback(fleet.close)
            loop = {"bfloat16": False, "scaler": False, "bucket_mib": options.bucket_mib,
                    "env": {"HVD_ORDER_TUNE": "0"}, **SYSTEMS[name]}  # fmt: skip
            fleet("build", job=name, system="language_loop", model=options.model,
                  compute_s=[options.ratio * wire_s] * options.hosts,
                  options={"max_norm": _NORM, "loop": loop})  # fmt: skip
            fleet("settle", job=name, at_least=_FIRST_STEPS)
            state = fleet("state_bytes", job=name)
            fleet.sleep()
            fleets[name] = fleet
            measured[name] = {"seconds": [], "cpu_s": [], "sent_bytes": [], "state_bytes": state}
        for _, name in turns(list(fleets), options.rounds):
            with fleets[name].awake():
                answers = fleets[name]("steps", job=name, count=options.steps, warm_up=_WARM_UP)
            one = measured[name]
            one["seconds"] += step_s(answers)
            one["cpu_s"].append(sum(answer["cpu_s"] for answer in answers))
            one["sent_bytes"].append(max(answer["sent_bytes"] for answer in answers))
        return {"wire_s": wire_s, "systems": measured}


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


def _table(summary: dict[str, Any]) -> str:
    return table(
        ["system", "step s", "/ DDP [95 %]", "CPU s", "sent MB", "state MB", "/ DDP's"],
        [
            [
                name, f"{one['step_s']:.3f}",
                f"{one['of_ddp']:.3f} [{one['of_ddp_low']:.3f}, {one['of_ddp_high']:.3f}]",
                f"{one['cpu_s']:.2f}", f"{one['sent_bytes'] / 1e6:.1f}",
                f"{one['state_bytes'] / 1e6:.1f}", f"{one['state_of_ddp']:.3f}",
            ]
            for name, one in summary["systems"].items()
        ],
    )  # fmt: skip


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
