"""Does the profile of one worker tell the throughput of TensorFlow's own servers? See README.md."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.planning.prediction.cells import closed_forms, row, summary_of
from benchmarks.planning.prediction.strategy_cluster import StrategyCluster
from benchmarks.runner.question import QUEUES, Answer, ask, option, queues
from benchmarks.runner.workloads.profiles import PROFILES, Profile
from hvd_order.planning.files.profile import read_profile
from hvd_order.planning.predict.workers.throughput import (
    Cluster,
    predict_servers,
    rate_while_all_train,
)
from hvd_order.planning.predict.workers.transmission import POLICIES
from hvd_order.planning.predict.workers.worker_step import WorkerStep

_WARM_UP = 4
_COMPUTE = 3.0  # computation of a step over one worker's transfer, one way
_PAYLOAD = 0.956 / 8  # bytes of TCP's payload for each bit of the link
_BARE = 12  # times that each bare fetch and push runs
_BARE_WARM_UP = 2
# A model has one Nth of its parameters, and links are slow: eight processes share two cores, and
# what they do beside sleeping should stay little of a step.
_SHRINK = {"resnet50": 16, "densenet121": 4, "gpt2_small": 64}


def measure(options: argparse.Namespace) -> Answer:
    cells: list[dict[str, Any]] = []
    alone: list[dict[str, Any]] = []
    for name in options.models:
        for one, some in _of_model(name, options):
            alone.append(one)
            cells += some
    summary = summary_of(cells)
    words = [f"{one['model']} {one['rate_mbit']:g} {one['error']:+.1%}" for one in alone]
    print(f"one worker, which was profiled: {', '.join(words)}")
    return Answer({"strategy_cells": cells, "alone": alone}, summary)


def _of_model(
    name: str, options: argparse.Namespace
) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """One worker profiled, the others predicted and measured; at each rate."""
    shrink = options.shrink or _SHRINK.get(name, 8)
    whole = PROFILES[name]()
    models = {
        mbit: whole.scaled_to(_COMPUTE * whole.size_bytes / shrink / (1e6 * mbit * _PAYLOAD))
        .shrunk(shrink)
        for mbit in options.rates_mbit
    }  # fmt: skip
    known = _profiled(models, options)
    measured: dict[float, dict[int, float]] = {mbit: {} for mbit in models}
    ends: dict[tuple[float, int], list[list[float]]] = {}
    for workers in options.workers:
        with _cluster(workers, models, options) as cluster:
            for mbit, model in models.items():
                cluster.set_rate(mbit)
                cluster.set_layers(_seconds(model))
                began = ends[mbit, workers] = cluster.run(_WARM_UP + options.steps)
                measured[mbit][workers] = rate_while_all_train(began, _WARM_UP)
    found = []
    for mbit, one in known.items():
        step, link = one["step"], one["cluster"]
        forms = closed_forms(step, link.worker_bytes_per_s, "async", measured[mbit])
        cells = []
        for workers, steps_per_s in measured[mbit].items():
            predicted = predict_servers(step, link, workers, 1)
            cells.append({
                "model": name, "rate_mbit": mbit, "mode": "async", "workers": workers,
                "measured": steps_per_s, "predicted": predicted.steps_per_s,
                "interval": [predicted.low, predicted.high],
                "error": predicted.steps_per_s / steps_per_s - 1,
                **forms[workers],
                "ends": ends[mbit, workers],
            })  # fmt: skip
            print(row(cells[-1]), flush=True)
        predicted = predict_servers(step, link, 1, 1)
        alone = {
            "model": name, "rate_mbit": mbit, "measured": one["measured"],
            "predicted": predicted.steps_per_s,
            "error": predicted.steps_per_s / one["measured"] - 1,
            "compute_s": statistics.fmean(step.compute_s),
            "bare": one["bare"], "link_bytes_per_s": link.worker_bytes_per_s, "knows": one["knows"],
        }  # fmt: skip
        found.append((alone, cells))
    return found


def _cluster(
    workers: int, models: dict[float, Profile], options: argparse.Namespace
) -> StrategyCluster:
    mbit, model = next(iter(models.items()))
    layers = [layer.tensors for layer in model.layers]
    return StrategyCluster(workers, layers, mbit, **queues(options))


def _seconds(model: Profile) -> list[float]:
    layers = model.layers
    return [one.forward_s for one in layers] + [one.backward_s for one in reversed(layers)]


def _profiled(
    models: dict[float, Profile], options: argparse.Namespace
) -> dict[float, dict[str, Any]]:
    """One worker and one server at each rate: the step, the cluster, and what they are from."""
    found = {}
    with _cluster(1, models, options) as cluster:
        for mbit, model in models.items():
            cluster.set_rate(mbit)
            cluster.set_layers(_seconds(model))
            with tempfile.TemporaryDirectory(prefix="hvd_order_strategy_") as folder:
                place = Path(folder)
                cluster.run(_WARM_UP)
                for worker in cluster.workers:
                    worker.ask("begins")
                traces = cluster.trace(place / "steps", "run", steps=options.profiled)
                began = cluster.workers[0].ask("begins")
                file = str(place / "profile.json")
                cluster.coordinator.ask("profile", worker=traces[0], servers=traces[1],
                                        model=model.name, file=file)  # fmt: skip
                profile = read_profile(file)
                times, _ = cluster.trace(place / "bare", "bare", times=_BARE)
                bare = cluster.coordinator.ask("bare_times", worker=times)
            costs = profile.servers
            assert costs is not None
            assert costs.strategy is not None
            step = WorkerStep.from_profile(profile, fetch_orders=costs.strategy.fetch_orders)
            link, knows = _link(bare, costs.strategy.between_s)
            link = replace(link, update_s=costs.update.seconds,
                           update_s_per_byte=costs.update.seconds_per_byte)  # fmt: skip
            print(model.name, f"{mbit:g}", knows, flush=True)
            found[mbit] = {
                "step": step, "cluster": link, "bare": bare, "knows": knows,
                "measured": rate_while_all_train([began], _WARM_UP),
            }  # fmt: skip
    return found


def _link(bare: dict[str, dict[str, Any]], between_s: float) -> tuple[Cluster, dict[str, float]]:
    """What fetches and pushes without a step tell of the link and of its ends.

    One tensor of one number tells the latency; small tensors, the time that an end takes for a
    tensor; large ones, the bandwidth.
    """
    ways = {}
    knows = {"between_s": between_s}
    for way in ("fetch", "push"):
        seconds = {
            name: statistics.median(bare[f"{way} {name}"]["seconds"][_BARE_WARM_UP:])
            for name in ("tiny", "small", "large")
        }
        small, large = bare[f"{way} small"], bare[f"{way} large"]
        tensor_s = max(0.0, seconds["small"] - seconds["tiny"]) / small["tensors"]
        bytes_per_s = large["bytes"] / (seconds["large"] - seconds["tiny"])
        ways[way] = (seconds["tiny"], tensor_s, bytes_per_s)
        knows.update({f"{way}_latency_s": seconds["tiny"], f"{way}_tensor_s": tensor_s,
                      f"{way}_bytes_per_s": bytes_per_s})  # fmt: skip
    bytes_per_s = max(each[2] for each in ways.values())
    turns = POLICIES["round_robin"]
    asks_s = ways["fetch"][0]
    fetch = replace(turns, latency_s=asks_s + between_s, receive_s=ways["fetch"][1])
    # A push begins with a fetch of the number that it sends.
    ends_s = max(0.0, ways["push"][0] - asks_s)
    push = replace(turns, latency_s=ends_s, receive_s=ways["push"][1])
    cluster = Cluster(bytes_per_s, pull=fetch, push=push, pulls="request", step_end="updated",
                      placement="in_turn")  # fmt: skip
    return cluster, knows


if __name__ == "__main__":
    sys.exit(ask(
        "prediction", __doc__, measure,
        option("--models", list(_SHRINK), choices=sorted(PROFILES)),
        option("--rates-mbit", [400.0, 200.0]),
        option("--workers", [2, 4, 6]),
        option("--shrink", None, "a model has 1/N of its parameters", type=int),
        option("--steps", 14, "measured steps of each worker"),
        option("--profiled", 43, "steps of the profile"),
        *QUEUES,
        on_hosts=True, quick={"models": ["resnet50"], "rates_mbit": [400.0], "workers": [2, 3],
                              "steps": 2, "profiled": 4},
    ))  # fmt: skip
