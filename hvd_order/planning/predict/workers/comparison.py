"""Predictions over numbers of workers and servers, with the closed forms beside them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hvd_order.base.errors import InvalidUsage
from hvd_order.planning.graph.graph import Graph
from hvd_order.planning.predict.coded import WORTH, coded_bytes
from hvd_order.planning.predict.network import Network
from hvd_order.planning.predict.workers.closed_forms import mean_value_analysis, upper_bound
from hvd_order.planning.predict.workers.fit import fit_optimus_async, fit_optimus_sync, fit_pollux
from hvd_order.planning.predict.workers.throughput import (
    Cluster,
    Mode,
    Throughput,
    predict_all_reduce,
    predict_servers,
)
from hvd_order.planning.predict.workers.worker_step import WorkerStep

__all__ = ["Row", "compare", "parse_counts"]

_MOST_COUNTS = 16  # simulated numbers of workers of a range
_FITTED = 4  # workers up to which the formulas are fitted


@dataclass(frozen=True)
class Row:
    """A prediction and what the closed forms say in its place; steps/s of all workers.

    Attributes:
        mean_value: mean-value analysis; None where it does not apply (synchronous, all-reduce).
        bound: the most without overlap within a step; None without servers.
        fitted: Optimus' formula, with all-reduce Pollux', fitted to the predictions for up to four
            workers; None for too few of them.
        coded: with the gradients in 8 bits on which all-reduces make the step wait; None: there are
            none, or the step is not clearly shorter with them.
    """

    found: Throughput
    mean_value: float | None
    bound: float | None
    fitted: float | None
    coded: float | None = None


def parse_counts(text: str, what: str) -> list[int]:
    """Reads ``1,2,4`` or ``1-64``; of a long range some numbers, ever farther apart.

    Raises:
        InvalidUsage: the text is none, or a number is below 1.
    """
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise InvalidUsage(f"{what} is {text!r}; expected numbers such as 1,2,4 or 1-64")
        low, high = int(first), int(last or first)
        if not 1 <= low <= high:
            raise InvalidUsage(f"{what} is {text!r}; expected 1 or more, the smaller number first")
        found |= set(_spaced(low, high))
    return sorted(found)


def _spaced(low: int, high: int) -> Iterable[int]:
    if high - low < _MOST_COUNTS:
        return range(low, high + 1)
    ratio = (high / low) ** (1 / (_MOST_COUNTS - 1))
    exact = [low * ratio**i for i in range(_MOST_COUNTS)]
    return [round(each) for each in exact]


def compare(
    step: WorkerStep,
    graph: Graph,
    cluster: Cluster,
    workers: Sequence[int],
    servers: Sequence[int],
    mode: Mode,
    seeds: int,
    slices: Callable[[int], int] | None = None,
) -> list[Row]:
    """Predicts each number of workers with each number of servers.

    Args:
        graph: of one worker's step, median times; for all-reduce.
        servers: without regard with all-reduce.
        slices: size of the slices by number of workers; None: as they are in ``step``.

    Raises:
        InvalidUsage: as of ``predict_servers`` and ``predict_all_reduce``.
    """
    if mode == "allreduce":
        rate, latency_s = cluster.worker_bytes_per_s, cluster.push.latency_s
        found = [
            predict_all_reduce(graph, step.compute_s, count, rate, latency_s) for count in workers
        ]
        return [
            Row(one, None, None, fitted, _coded(one, graph, step.compute_s, rate, latency_s))
            for one, fitted in zip(found, _pollux(found), strict=True)
        ]
    steps = {count: step if slices is None else step.in_slices(slices(count)) for count in workers}
    found = [
        predict_servers(of_count, cluster, count, number, mode, seeds)
        for number in servers
        for count, of_count in steps.items()
    ]
    rows = []
    for one, fitted in zip(found, _optimus(found, mode), strict=True):
        think_s, stations = _network(step, cluster, one.servers)
        mean_value = None
        if mode == "async":
            mean_value = mean_value_analysis(think_s, stations, one.workers)[-1]
        bound = upper_bound(think_s, stations, one.workers)
        rows.append(Row(one, mean_value, bound, fitted))
    return rows


def _coded(
    plain: Throughput, graph: Graph, compute_s: Sequence[float], rate: float, latency_s: float
) -> float | None:
    """Steps/s with ``Compression.auto``; None if it would choose nothing."""
    if plain.workers == 1:
        return None
    coded = coded_bytes(graph, Network.of_ring(plain.workers, rate, latency_s).link)
    if not coded:
        return None
    found = predict_all_reduce(
        graph, compute_s, plain.workers, rate, latency_s, coded=coded
    ).steps_per_s
    return found if found > WORTH * plain.steps_per_s else None


def _network(step: WorkerStep, cluster: Cluster, servers: int) -> tuple[float, list[float]]:
    """Time of a worker's computation, and of its step at each station of the busiest server."""
    loads = [0] * servers
    pieces = [0] * servers
    places = step.on_servers(servers, cluster.placement)
    for server, size in zip(places, step.tensor_bytes, strict=True):
        loads[server] += size
        pieces[server] += 1
    size = max(loads)
    rate = cluster.server_bytes_per_s or cluster.worker_bytes_per_s
    update_s = cluster.update_s_per_byte * size + cluster.update_s * pieces[loads.index(size)]
    updates = [update_s / cluster.update_lanes] if update_s else []
    return statistics.fmean(step.compute_s), [size / rate, size / rate, *updates]


def _optimus(found: Sequence[Throughput], mode: Mode) -> list[float | None]:
    few = [one for one in found if one.workers <= _FITTED]
    if len({one.workers for one in few}) < 2:
        return [None] * len(found)
    if mode == "async":
        of_async = fit_optimus_async([(o.workers, o.servers, o.steps_per_s) for o in few])
        return [of_async.steps_per_s(o.workers, o.servers) for o in found]
    # Each worker has one batch, so the global batch is the number of workers.
    of_sync = fit_optimus_sync(
        [(o.workers, o.servers, o.workers, o.steps_per_s / o.workers) for o in few]
    )
    return [o.workers * of_sync.steps_per_s(o.workers, o.servers, o.workers) for o in found]


def _pollux(found: Sequence[Throughput]) -> list[float | None]:
    few = [one for one in found if one.workers <= _FITTED]
    if len(few) < 2 or all(one.workers > 1 for one in few):
        return [None] * len(found)
    formula = fit_pollux([(1.0, o.workers, o.workers, o.workers / o.steps_per_s) for o in few])
    steps_s = [formula.step_s(1.0, one.workers, one.workers) for one in found]
    return [
        one.workers / step_s if math.isfinite(step_s) else None
        for one, step_s in zip(found, steps_s, strict=True)
    ]
