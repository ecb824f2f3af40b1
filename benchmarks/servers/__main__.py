"""What do ordered, balanced parameter servers give on ordinary networks? See README.md."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.hosts import EmulatedHosts, add_queue_options, queues, why_not
from benchmarks.runner.records.environment import started
from benchmarks.runner.records.record import (
    DEFAULT_FOLDER,
    add_out_option,
    settings_of,
    write_record,
)
from benchmarks.runner.records.summary import paired_ratio
from benchmarks.runner.turns import turns
from benchmarks.runner.workloads.profiles import PROFILES
from benchmarks.servers.elastic import elastic
from benchmarks.servers.placed_job import PlacedJob

_PAYLOAD = 0.956  # of the wire rate, with frames of 1500 bytes


def raw(options: argparse.Namespace) -> dict[str, Any]:
    """Push and pull of 64 MB, against what two full-duplex links a pair could do."""
    size, rate = 64_000_000, options.rate_mbit
    with EmulatedHosts(count=4, rate_mbit=rate, **queues(options)) as hosts:
        placed = PlacedJob(hosts, workers=2, servers=2)
        bound_s = size * 8 / (rate * 1e6)
        settings = [(256, 8), (512, 8), (1024, 6)]
        seconds: dict[str, list[float]] = {f"{kib} KiB x {n}": [] for kib, n in settings}
        for _, name in turns(list(seconds), options.rounds):
            kib, in_flight = settings[list(seconds).index(name)]
            job = {"what": "raw", "bytes": size, "piece_bytes": kib * 1024,
                   "in_flight": in_flight, "repeats": 5}  # fmt: skip
            seconds[name] += placed.run(job, {})["seconds"]
    for name, values in seconds.items():
        median = statistics.median(values)
        print(
            f"raw, {name}: {median:.3f} s ({min(values):.3f}-{max(values):.3f}), "
            f"{bound_s / median:.1%} of the full-duplex bound {bound_s:.3f} s"
        )
    shares = {name: bound_s / statistics.median(values) for name, values in seconds.items()}
    return {"raw": {"seconds": seconds, "bound_s": bound_s}, "summary": {"share_of_bound": shares}}


def ordered(options: argparse.Namespace) -> dict[str, Any]:
    """Steps of ResNet-50, ratio 1, with 4 workers and 2 servers: in order, and as it comes."""
    workers, servers = 4, 2
    wire_s = PROFILES["resnet50"]().size_bytes * workers / servers * 8 / (
        options.rate_mbit * 1e6 * _PAYLOAD
    )  # fmt: skip
    systems = {
        "in order": {},
        "as it comes": {"HVD_ORDER_POLICY": "arrival"},
        "as it comes, all awaited": {
            "HVD_ORDER_POLICY": "arrival",
            "HVD_ORDER_CROSS_ITERATION": "0",
        },
    }
    sizes = {"HVD_ORDER_TUNE": "0"}  # its own choice; trials would take longer than the run
    plain = {"HVD_ORDER_SLICE_BYTES": "4MiB", "HVD_ORDER_CREDIT_BYTES": "256MiB"}
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    job = {"what": "steps", "model": "resnet50", "compute_s": wire_s, "steps": options.steps + 4}
    with EmulatedHosts(
        count=workers + servers, rate_mbit=options.rate_mbit, **queues(options)
    ) as hosts:
        placed = PlacedJob(hosts, workers, servers)
        for _, name in turns(list(systems), options.rounds):
            cut = sizes if name == "in order" else plain
            answer = placed.run(job, {**cut, **systems[name], "HVD_ORDER_PS_BALANCE": "0"})
            assert answer["same"], "the workers' weights differ"
            seconds[name] += answer["seconds"][4:]
    for name, values in seconds.items():
        ratio = paired_ratio(seconds["in order"], values)
        print(
            f"resnet50, 4 workers, 2 servers, {name}: step {statistics.median(values):.3f} s "
            f"({min(values):.3f}-{max(values):.3f}), wire {wire_s:.3f} s; in order takes {ratio} "
            "of it"
        )
    ratios = {
        name: paired_ratio(seconds["in order"], values).to_json()
        for name, values in seconds.items()
        if name != "in order"
    }
    return {"raw": {"seconds": seconds, "wire_s": wire_s}, "summary": {"in_order_over": ratios}}


_STRAGGLERS = [
    ("densenet121", 1, "slow line"),
    ("vgg16", 16, "slow line"),
    ("densenet121", 1, "busy core"),
    ("densenet121", 1, "nothing wrong"),
]


def straggler(options: argparse.Namespace) -> dict[str, Any]:
    """One of four servers slow: the even split against slices that move."""
    workers, servers, rate = 4, 4, options.rate_mbit * 0.2
    found: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    knobs = {"HVD_ORDER_SLICE_BYTES": "256KiB", "HVD_ORDER_CREDIT_BYTES": "1MiB"}
    for model, shrink, trouble in _STRAGGLERS[: options.stragglers]:
        job = {"what": "steps", "model": model, "shrink": shrink, "compute_s": 1e-3}
        runs: dict[str, Any] = {}
        for name, balance, steps in (("even", "0", 14), ("balanced", "1", 34)):
            with EmulatedHosts(count=workers + servers, rate_mbit=rate, **queues(options)) as hosts:
                placed = PlacedJob(hosts, workers, servers)
                if trouble == "slow line":
                    hosts.set_rate(placed.server_host(1), rate / 4)
                answer = placed.run(
                    {**job, "steps": steps}, {**knobs, "HVD_ORDER_PS_BALANCE": balance},
                    busy=1 if trouble == "busy core" else None,
                )  # fmt: skip
            runs[name] = {"seconds": answer["seconds"], "owned_slices": answer["owned_slices"]}
        even = statistics.median(runs["even"]["seconds"][4:])
        balanced = runs["balanced"]["seconds"]
        late = statistics.median(balanced[24:])
        near = next((i for i, s in enumerate(balanced) if i > 3 and s <= late / 0.9), None)
        print(
            f"{model} / {shrink}, {trouble}: even split {even:.3f} s a step, balanced {late:.3f} s "
            f"after 24 steps: {even / late:.2f} times as fast; within 10 % of that in step {near}",
            flush=True,
        )
        found[f"{model}, {trouble}"] = runs
        summary[f"{model}, {trouble}"] = {"gain": even / late, "near_in_step": near}
    return {"raw": found, "summary": summary}


def aggregation(options: argparse.Namespace) -> dict[str, Any]:
    """Asynchronous workers, a slow line, slices that do not move: helpers against none."""
    workers, servers, rate = 4, 4, options.rate_mbit * 0.2
    knobs = {
        "HVD_ORDER_SLICE_BYTES": "256KiB", "HVD_ORDER_CREDIT_BYTES": "1MiB",
        "HVD_ORDER_PS_UPDATE": "server", "HVD_ORDER_PS_MODE": "async",
        "HVD_ORDER_PS_DELAY_BOUND": "100", "HVD_ORDER_PS_BALANCE": "0",
    }  # fmt: skip
    job: dict[str, Any] = {
        "what": "steps", "model": "densenet121", "compute_s": 1e-3, "steps": options.steps + 4
    }  # fmt: skip
    found: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    for trouble in ("slow line", "nothing wrong"):
        seconds: dict[str, list[float]] = {"straight": [], "aggregated": []}
        by_helpers: list[float] = []
        for _, name in turns(list(seconds), options.rounds):
            with EmulatedHosts(count=workers + servers, rate_mbit=rate, **queues(options)) as hosts:
                placed = PlacedJob(hosts, workers, servers)
                if trouble == "slow line":
                    hosts.set_rate(placed.server_host(1), rate / 4)
                switch = {"HVD_ORDER_PS_AGGREGATE": str(int(name == "aggregated"))}
                answer = placed.run(job, {**knobs, **switch})
            seconds[name] += answer["seconds"][4:]
            if name == "aggregated":
                model_bytes = PROFILES["densenet121"]().size_bytes
                by_helpers.append(answer["aggregated_bytes"] / model_bytes / (job["steps"] - 2))
        ratio = paired_ratio(seconds["aggregated"], seconds["straight"])
        print(
            f"aggregation, {trouble}: straight {statistics.median(seconds['straight']):.3f} s a "
            f"step, aggregated {statistics.median(seconds['aggregated']):.3f} s, "
            f"{statistics.fmean(by_helpers):.0%} of the updates by helpers: {ratio}",
            flush=True,
        )
        found[trouble] = {**seconds, "by_helpers": by_helpers}
        summary[trouble] = ratio.to_json()
    return {"raw": found, "summary": {"aggregated_over_straight": summary}}


_PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "raw": raw,
    "ordered": ordered,
    "straggler": straggler,
    "aggregation": aggregation,
    "elastic": elastic,
}
_LOCAL = {"elastic"}  # needs no emulated hosts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition(" See")[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", choices=list(_PARTS), default=list(_PARTS))
    parser.add_argument("--rate-mbit", type=float, default=1000.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10, help="measured steps in each turn")
    parser.add_argument("--stragglers", type=int, default=4, help="the first so many of four")
    parser.add_argument("--events", type=int, default=10, help="elastic: of each kind")
    add_queue_options(parser)
    add_out_option(parser)
    options = parser.parse_args()
    reason = None if _LOCAL.issuperset(options.only) else why_not()
    if reason:
        print(f"emulated hosts do not work here: {reason}", file=sys.stderr)
        return 2
    found = started()
    results = {part: _PARTS[part](options) for part in options.only}
    write_record(
        "parameter_server", found, settings_of(options),
        {part: result["raw"] for part, result in results.items()},
        {part: result["summary"] for part, result in results.items()},
        options.out or DEFAULT_FOLDER / f"parameter_server-{'-'.join(options.only)}.json",
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
