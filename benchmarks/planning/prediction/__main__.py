"""Does the profile of one worker tell the throughput of several? See README.md."""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from dataclasses import replace
from typing import Any, Literal

from benchmarks.hosts import EmulatedHosts
from benchmarks.planning.prediction.cells import closed_forms, row, summary_of
from benchmarks.planning.prediction.model import graph_of
from benchmarks.runner.question import QUEUES, Answer, ask, option, queues
from benchmarks.runner.workloads.profiles import PROFILES, Profile
from benchmarks.servers.placed_job import PlacedJob
from hvd_order.planning.files.profiled_servers import costs_from
from hvd_order.planning.predict.workers.calibration import calibrate, measured_cluster
from hvd_order.planning.predict.workers.throughput import (
    predict_all_reduce,
    predict_servers,
    rate_while_all_train,
)
from hvd_order.planning.predict.workers.worker_step import WorkerStep, usual_slice_bytes
from hvd_order.servers.costs import ServerCosts

_LATENCY_S = 100e-6
_WARM_UP = 6  # steps in which servers sum, and the order is learnt
_COMPUTE = 3.0  # computation of a step over one worker's transfer, one way
_PAYLOAD = 0.95  # of a link's nominal rate; only how long models compute depends on it
_LINK_BYTES = 16_000_000
_LINK_IN_FLIGHT = 4
_LINK_SLICE_BYTES = 512 << 10
_MODES = ("async", "bounded", "sync", "allreduce")
_DELAY_BOUND = 3  # updates, in the mode "bounded": few are late with 4 workers, many with 8
# A model has one Nth of its parameters, and links are slow: up to nine processes share two cores,
# and what they do beside sleeping should stay little of a step.
_SHRINK = {"resnet50": 4, "densenet121": 2, "gpt2_small": 16}


def measure(options: argparse.Namespace) -> Answer:
    cells = [
        cell
        for name in options.models
        for rate_mbit in options.rates_mbit
        for mode in options.modes
        for cell in _cells(name, rate_mbit, mode, options)
    ]
    return Answer({"cells": cells}, summary_of(cells))


def _cells(
    name: str, rate_mbit: float, mode: str, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """One worker with one server profiled, several predicted and measured."""
    profile = _layers(name, rate_mbit)
    recorded = _run(profile, name, rate_mbit, mode, 1, options)
    updates_s = recorded["updates"][_WARM_UP:] if mode == "allreduce" else ()
    graph, rows = graph_of(profile, recorded["events"][_WARM_UP:], updates_s)
    # There is no all-reduce of one worker, so its link is that to a server.
    linked = (
        recorded if mode != "allreduce" else _run(profile, name, rate_mbit, "async", 1, options)
    )
    costs = costs_from(linked["servers"])
    link = _measured_link(rate_mbit, **queues(options))
    slice_bytes = usual_slice_bytes(graph.parameters, link, _LATENCY_S)
    step = WorkerStep(graph, rows, slice_bytes=slice_bytes)
    measured: dict[int, float] = {}
    ends: dict[int, list[list[float]]] = {}
    late: dict[int, float] = {}
    for workers in options.workers:
        found = _run(profile, name, rate_mbit, mode, workers, options)
        ends[workers] = found["ends"]
        updates = len(step.tensor_bytes) * workers * options.steps
        late[workers] = found["late"] / updates
        measured[workers] = rate_while_all_train(ends[workers], _WARM_UP)
    forms = closed_forms(step, link, mode, measured)
    cells = []
    for workers, steps_per_s in measured.items():
        predicted = _predicted(step, costs, link, mode, workers)
        cells.append({
            "model": name, "rate_mbit": rate_mbit, "mode": mode, "workers": workers,
            "measured": steps_per_s, **predicted,
            "error": predicted["predicted"] / steps_per_s - 1,
            **forms[workers],
            "compute_s": statistics.fmean(step.compute_s),
            "profiled": linked["servers"],
            "ends": ends[workers], "late": late[workers],
        })  # fmt: skip
        print(row(cells[-1]), flush=True)
    return cells


def _predicted(
    step: WorkerStep, costs: ServerCosts, link: float, mode: str, workers: int
) -> dict[str, Any]:
    """What `hvd-order predict --bandwidth` says from such a profile."""
    if mode == "allreduce":
        found = predict_all_reduce(step.graph, step.compute_s, workers, link, _LATENCY_S)
        exchange_s = 0.0
    else:
        bound = _DELAY_BOUND if mode == "bounded" else None
        calibration = calibrate(step, costs, _LATENCY_S)
        cluster = measured_cluster(costs, _LATENCY_S)
        assert calibration is not None
        assert cluster is not None
        cluster = replace(cluster, worker_bytes_per_s=link, delay_bound=bound)
        exchange_s = calibration.exchange_s
        rule: Literal["sync", "async"] = "sync" if mode == "sync" else "async"
        cut = calibration.step
        if mode == "sync":
            parameters = step.graph.parameters
            cut = cut.in_slices(usual_slice_bytes(parameters, link, _LATENCY_S, workers))
        found = predict_servers(cut, cluster, workers, 1, rule)
    return {
        "predicted": found.steps_per_s, "interval": [found.low, found.high],
        "predicted_late": found.late, "exchange_s": exchange_s, "link_bytes_per_s": link,
    }  # fmt: skip


@functools.cache
def _measured_link(rate_mbit: float, **queues: Any) -> float:
    """Bytes/s of a server's link, each way, while two workers push and pull at once."""
    job = {"what": "raw", "bytes": _LINK_BYTES, "piece_bytes": _LINK_SLICE_BYTES,
           "in_flight": _LINK_IN_FLIGHT, "repeats": 5}  # fmt: skip
    with EmulatedHosts(3, rate_mbit, **queues) as hosts:
        seconds = PlacedJob(hosts, 2, 1).run(job, {})["seconds"]
    return 2 * _LINK_BYTES / statistics.median(seconds)


def _layers(name: str, rate_mbit: float) -> Profile:
    shrink = _SHRINK.get(name, 1)
    rate = _PAYLOAD * rate_mbit * 1e6 / 8
    profile = PROFILES[name]()
    compute_s = _COMPUTE * profile.size_bytes / shrink / rate
    return profile.scaled_to(compute_s).shrunk(shrink)


def _run(
    profile: Profile,
    name: str,
    rate_mbit: float,
    mode: str,
    workers: int,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """A job, with one server unless ranks reduce; one worker is recorded."""
    job = {
        "what": "steps", "model": name, "shrink": _SHRINK.get(name, 1), "warm_up": _WARM_UP,
        "compute_s": sum(layer.forward_s + layer.backward_s for layer in profile.layers),
        "steps": options.steps + _WARM_UP, "record": workers == 1 and mode != "allreduce",
        "momentum": 0.0,
    }  # fmt: skip
    servers = int(mode != "allreduce")
    knobs = {"HVD_ORDER_TUNE": "0"}  # the settings that follow from the link alone
    if servers:
        knobs |= {"HVD_ORDER_PS_UPDATE": "server", "HVD_ORDER_PS_BALANCE": "0",
                  "HVD_ORDER_PS_MODE": "sync" if mode == "sync" else "async"}  # fmt: skip
    if mode == "bounded":
        knobs["HVD_ORDER_PS_DELAY_BOUND"] = str(_DELAY_BOUND)
    count = max(2, workers + servers)
    with EmulatedHosts(count, rate_mbit, **queues(options)) as hosts:
        return PlacedJob(hosts, workers, servers).run(job, knobs)


if __name__ == "__main__":
    sys.exit(ask(
        "prediction", __doc__, measure,
        option("--models", list(_SHRINK), choices=sorted(PROFILES)),
        option("--rates-mbit", [500.0]),
        option("--modes", ["async", "sync", "allreduce"], choices=_MODES),
        option("--workers", [2, 4, 8]),
        option("--steps", 8, "measured steps of each worker"),
        *QUEUES,
        on_hosts=True, quick={"models": ["resnet50"], "modes": ["sync"], "workers": [2, 3],
                              "steps": 2},
    ))  # fmt: skip
