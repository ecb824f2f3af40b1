"""What do ordered, balanced parameter servers give on ordinary networks? See README.md."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.hosts import EmulatedHosts, why_not
from benchmarks.runner.question import QUEUES, Answer, ask, option, queues
from benchmarks.runner.records.summary import paired_ratio
from benchmarks.runner.turns import take_turns
from benchmarks.runner.workloads.profiles import PROFILES
from benchmarks.servers.elastic import elastic
from benchmarks.servers.placed_job import PlacedJob

_PAYLOAD = 0.956  # of the wire rate, with frames of 1500 bytes
_UNMEASURED = 4  # steps at first: the model is learnt
Part = tuple[dict[str, Any], dict[str, Any]]
"""All measurements of a part, and their summary."""


def raw(options: argparse.Namespace) -> Part:
    """Push and pull of 64 MB, against what two full-duplex links a pair could do."""
    size, rate = 64_000_000, options.rate_mbit
    settings = {f"{kib} KiB x {n}": (kib, n) for kib, n in ((256, 8), (512, 8), (1024, 6))}
    bound_s = size * 8 / (rate * 1e6)
    with EmulatedHosts(count=4, rate_mbit=rate, **queues(options)) as hosts:
        placed = PlacedJob(hosts, workers=2, servers=2)

        def run(name: str) -> list[float]:
            kib, in_flight = settings[name]
            job = {"what": "raw", "bytes": size, "piece_bytes": kib * 1024,
                   "in_flight": in_flight, "repeats": 5}  # fmt: skip
            seconds: list[float] = placed.run(job, {})["seconds"]
            return seconds

        seconds = take_turns(settings, run, options.rounds)
    shares = {name: bound_s / statistics.median(values) for name, values in seconds.items()}
    print(f"raw: {shares} of the full-duplex bound {bound_s:.3f} s")
    return {"seconds": seconds, "bound_s": bound_s}, {"share_of_bound": shares}


def ordered(options: argparse.Namespace) -> Part:
    """Steps of ResNet-50, ratio 1, with 4 workers and 2 servers: in order, and as it comes."""
    workers, servers = 4, 2
    wire_s = PROFILES["resnet50"]().size_bytes * workers / servers * 8 / (
        options.rate_mbit * 1e6 * _PAYLOAD
    )  # fmt: skip
    pieces = {"HVD_ORDER_POLICY": "arrival", "HVD_ORDER_SLICE_BYTES": "4MiB",
              "HVD_ORDER_CREDIT_BYTES": "256MiB"}  # fmt: skip
    systems = {
        # Its own choice; trials would take longer than the run.
        "in order": {"HVD_ORDER_TUNE": "0"},
        "as it comes": pieces,
        "as it comes, all awaited": {**pieces, "HVD_ORDER_CROSS_ITERATION": "0"},
    }
    job = {"what": "steps", "model": "resnet50", "compute_s": wire_s,
           "steps": options.steps + _UNMEASURED}  # fmt: skip
    with EmulatedHosts(workers + servers, options.rate_mbit, **queues(options)) as hosts:
        placed = PlacedJob(hosts, workers, servers)

        def run(name: str) -> list[float]:
            answer = placed.run(job, {**systems[name], "HVD_ORDER_PS_BALANCE": "0"})
            assert answer["same"], "the workers' weights differ"
            return list(answer["seconds"][_UNMEASURED:])

        seconds = take_turns(systems, run, options.rounds)
    ratios = {}
    for name, values in seconds.items():
        ratio = paired_ratio(seconds["in order"], values)
        print(f"resnet50, {name}: step {statistics.median(values):.3f} s, wire {wire_s:.3f} s; in "
              f"order takes {ratio} of it")  # fmt: skip
        ratios[name] = ratio.to_json()
    return {"seconds": seconds, "wire_s": wire_s}, {"in_order_over": ratios}


_STRAGGLERS = [
    ("densenet121", 1, "slow line"),
    ("vgg16", 16, "slow line"),
    ("densenet121", 1, "busy core"),
    ("densenet121", 1, "nothing wrong"),
]


def straggler(options: argparse.Namespace) -> Part:
    """One of four servers slow: the even split against slices that move."""
    found: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    steps = {"even": 14, "balanced": 34}
    if options.quick:
        steps = {"even": 6, "balanced": 26}
    for model, shrink, trouble in _STRAGGLERS[: options.stragglers]:
        job = {"what": "steps", "model": model, "shrink": shrink, "compute_s": 1e-3, "owned": True}
        runs: dict[str, Any] = {}
        for name, count in steps.items():
            knobs = {"HVD_ORDER_PS_BALANCE": str(int(name == "balanced"))}
            answer = _with_trouble({**job, "steps": count}, trouble, knobs, options)
            runs[name] = {"seconds": answer["seconds"], "owned_slices": answer["owned_slices"]}
        even = statistics.median(runs["even"]["seconds"][_UNMEASURED:])
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
    return found, summary


def aggregation(options: argparse.Namespace) -> Part:
    """Asynchronous workers, a slow line, slices that do not move: helpers against none."""
    asynchronous = {
        "HVD_ORDER_PS_UPDATE": "server", "HVD_ORDER_PS_MODE": "async",
        "HVD_ORDER_PS_DELAY_BOUND": "100", "HVD_ORDER_PS_BALANCE": "0",
    }  # fmt: skip
    job = {"what": "steps", "model": "densenet121", "compute_s": 1e-3,
           "steps": options.steps + _UNMEASURED}  # fmt: skip
    found: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    for trouble in ("slow line", "nothing wrong"):

        def run(name: str, trouble: str = trouble) -> list[float]:
            helpers = {"HVD_ORDER_PS_AGGREGATE": str(int(name == "aggregated"))}
            answer = _with_trouble(job, trouble, {**asynchronous, **helpers}, options)
            return list(answer["seconds"][_UNMEASURED:])

        found[trouble] = seconds = take_turns(("straight", "aggregated"), run, options.rounds)
        ratio = paired_ratio(seconds["aggregated"], seconds["straight"])
        print(f"{trouble}: aggregated / straight {ratio}", flush=True)
        summary[trouble] = ratio.to_json()
    return found, {"aggregated_over_straight": summary}


def _with_trouble(
    job: Mapping[str, Any], trouble: str, knobs: Mapping[str, str], options: argparse.Namespace
) -> dict[str, Any]:
    """Four workers and four servers, one of which has a slow line, a busy core, or neither."""
    rate_mbit = options.rate_mbit * 0.2
    sizes = {"HVD_ORDER_SLICE_BYTES": "256KiB", "HVD_ORDER_CREDIT_BYTES": "1MiB"}
    with EmulatedHosts(count=8, rate_mbit=rate_mbit, **queues(options)) as hosts:
        placed = PlacedJob(hosts, workers=4, servers=4)
        if trouble == "slow line":
            hosts.set_rate(placed.server_host(1), rate_mbit / 4)
        busy = 1 if trouble == "busy core" else None
        return placed.run(job, {**sizes, **knobs}, busy)


_PARTS: dict[str, Callable[[argparse.Namespace], Part]] = {
    "raw": raw,
    "ordered": ordered,
    "straggler": straggler,
    "aggregation": aggregation,
    "elastic": elastic,
}


def measure(options: argparse.Namespace) -> Answer:
    found = {part: _PARTS[part](options) for part in options.only}
    return Answer(
        {part: measured for part, (measured, _) in found.items()},
        {part: summary for part, (_, summary) in found.items()},
        name=f"parameter_server-{'-'.join(options.only)}",
    )


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if options.only != ["elastic"] and (reason := why_not()):  # its processes are local
        parser.error(f"emulated hosts do not work here: {reason}")


if __name__ == "__main__":
    sys.exit(ask(
        "parameter_server", __doc__, measure,
        option("--only", list(_PARTS), choices=list(_PARTS)),
        option("--rate-mbit", 1000.0),
        option("--rounds", 2),
        option("--steps", 10, "measured steps in each turn"),
        option("--stragglers", 4, "the first so many of four"),
        option("--events", 10, "elastic: of each kind"),
        *QUEUES,
        check=_check,
        quick={"rounds": 1, "steps": 2, "stragglers": 1, "events": 1},
    ))  # fmt: skip
