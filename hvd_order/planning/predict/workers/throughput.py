"""Predicts the throughput of workers from one worker's step, over random draws of its durations.

Source: Li, Paolieri, Golubchik, "Throughput prediction of asynchronous SGD in TensorFlow", ICPE
2020: synthetic traces of several workers from the profile of one.
"""

from __future__ import annotations

import math
import random
import statistics
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from hvd_order._native import _core
from hvd_order.base.errors import InvalidUsage
from hvd_order.planning.graph.graph import Graph
from hvd_order.planning.predict.coded import coded_transfers, in_order
from hvd_order.planning.predict.network import USUAL_LATENCY_S, Network
from hvd_order.planning.predict.simulate import simulate
from hvd_order.planning.predict.workers.transmission import POLICIES, TransmissionPolicy
from hvd_order.planning.predict.workers.worker_step import Placement, WorkerStep
from hvd_order.planning.predict.workload import workload_of
from hvd_order.planning.steps.program import gradient_transfers

__all__ = [
    "Cluster",
    "Mode",
    "Throughput",
    "predict_all_reduce",
    "predict_servers",
    "rate_while_all_train",
    "saturation",
    "simulate_servers",
]

Mode = Literal["async", "sync", "allreduce"]

_SEEDS = 5
_LEAST_STEPS = 40  # of each worker
_FEWEST_STEPS = 10  # that a caller may ask for
_ALL_STEPS = 400  # of all workers, at least
_DRAWS = 12  # of the ranks' speeds, all-reduce
# 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom; beyond, the normal one serves.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
_GAIN = 0.95  # of the most, at which more workers gain nothing


@dataclass(frozen=True)
class Cluster:
    """Links, servers and rules of a job with parameter servers.

    Attributes:
        worker_bytes_per_s: of a worker's link, each way, as payload gets it.
        server_bytes_per_s: of a server's link; None: the same.
        pull, push: how tensors travel from and to the servers.
        pulls: "answer": a server sends a parameter as soon as it has applied the worker's gradient
            (hvd_order); "request": the worker asks when its step begins (TensorFlow).
        step_end: what the next step waits for, beside computation and pulls: "computed": nothing;
            "pushed": the gradients have left; "updated": they are applied.
        staleness: async: a pull waits while the slowest worker is more than this number of steps
            behind; None: never.
        delay_bound: async, pulls that are answers: an update is applied at most this number of
            updates after the one that its worker had read, or not sent at all; None: any number.
        aggregates: with a delay bound: other servers add up the updates of several workers and send
            the owner the sum, where this is faster.
        update_s_per_byte, update_s: time of a server for a tensor that it applies or adds up.
        update_lanes: updates that a server works on at a time.
        placement: which server has which tensor, as of `WorkerStep.on_servers`.
    """

    worker_bytes_per_s: float
    server_bytes_per_s: float | None = None
    pull: TransmissionPolicy = field(default_factory=lambda: POLICIES["ordered"])
    push: TransmissionPolicy = field(default_factory=lambda: POLICIES["ordered"])
    pulls: Literal["answer", "request"] = "answer"
    step_end: Literal["computed", "pushed", "updated"] = "computed"
    staleness: int | None = None
    delay_bound: int | None = None
    aggregates: bool = False
    update_s_per_byte: float = 0.0
    update_s: float = 0.0
    update_lanes: int = 1
    placement: Placement = "by_size"

    @property
    def slower_bytes_per_s(self) -> float:
        """Of a connection alone."""
        return min(self.worker_bytes_per_s, self.server_bytes_per_s or math.inf)


@dataclass(frozen=True)
class Throughput:
    """Predicted steps/s of all workers together, with the interval of the mean at 95 %.

    A synchronous step of W workers counts as W, so that a step is one batch everywhere.

    Attributes:
        server_busy: largest share of the time in which a server's link is busy; 0 without servers.
        late: share of the updates that came too late for a delay bound and were not sent.
        aggregated: share of the updates that helpers added up.
    """

    workers: int
    servers: int
    mode: Mode
    steps_per_s: float
    low: float
    high: float
    server_busy: float = 0.0
    late: float = 0.0
    aggregated: float = 0.0


_STEP_ENDS = {
    "computed": _core.SampledStepEnd.COMPUTED,
    "pushed": _core.SampledStepEnd.PUSHED,
    "updated": _core.SampledStepEnd.UPDATED,
}


def predict_servers(
    step: WorkerStep,
    cluster: Cluster,
    workers: int | Sequence[float],
    servers: int,
    mode: Literal["async", "sync"] = "async",
    seeds: int = _SEEDS,
    steps: int | None = None,
) -> Throughput:
    """Predicts a job with parameter servers.

    Args:
        workers: number of workers of equal speed, or a time factor for each.
        seeds: simulations, each with draws of its own.
        steps: of each worker in a simulation; the first fifth is dropped. None: enough.

    Raises:
        InvalidUsage: the numbers are impossible; the message says which.
    """
    slowness = [1.0] * workers if isinstance(workers, int) else list(workers)
    if not slowness:
        raise InvalidUsage("0 workers; at least 1 is needed")
    if servers < 1:
        raise InvalidUsage(f"{servers} servers; at least 1 is needed")
    if cluster.staleness is not None and (cluster.staleness < 0 or mode == "sync"):
        raise InvalidUsage(
            f"a staleness of {cluster.staleness} steps, {mode}; expected 0 or more, and "
            "asynchronous workers"
        )
    _check_bound(cluster, mode)
    if steps is not None and steps < _FEWEST_STEPS:
        raise InvalidUsage(f"{steps} steps of each worker; at least {_FEWEST_STEPS} are needed")
    if not cluster.worker_bytes_per_s > 0:
        raise InvalidUsage(f"a bandwidth of {cluster.worker_bytes_per_s} bytes/s; expected more")
    count = steps or max(_LEAST_STEPS, _ALL_STEPS // len(slowness))
    wire_s = 2 * sum(step.tensor_bytes) / cluster.slower_bytes_per_s
    rates, busy, late, aggregated = [], [], [], []
    spread_s = 0.0 if mode == "sync" else statistics.fmean(step.compute_s) + wire_s
    for seed in range(seeds):
        result = simulate_servers(
            step, cluster, slowness, servers, mode, count, seed=seed, spread_s=spread_s
        )
        rates.append(rate_while_all_train(result.step_ends_s, max(2, count // 5)))
        links = [*result.pull_busy_s, *result.push_busy_s]
        busy.append(max(links) / result.end_s)
        updates = len(step.tensor_bytes) * sum(len(ends) for ends in result.step_ends_s)
        late.append(result.late_updates / updates)
        aggregated.append(result.aggregated_updates / updates)
    mean, low, high = _interval(rates)
    return Throughput(
        len(slowness),
        servers,
        mode,
        mean,
        low,
        high,
        *(statistics.fmean(each) for each in (busy, late, aggregated)),
    )


def simulate_servers(
    step: WorkerStep,
    cluster: Cluster,
    slowness: Sequence[float],
    servers: int,
    mode: Literal["async", "sync"],
    steps: int,
    *,
    seed: int = 0,
    spread_s: float = 0.0,
    program_order: bool = False,
    recorded: int = 0,
) -> _core.SampledResult:
    """Trains once in virtual time.

    Args:
        slowness: time factor of each worker.
        spread_s: workers begin at random within this time.
        program_order: whether a stream runs its ops as listed, and waits for each.
        recorded: number of the first steps whose ops and transfers are recorded.

    Raises:
        InvalidUsage: the numbers are impossible; the message says which.
    """
    return _core.simulate_sampled(
        step.native,
        slowness=list(slowness),
        servers=servers,
        server_of=step.on_servers(servers, cluster.placement),
        worker_bytes_per_s=cluster.worker_bytes_per_s,
        server_bytes_per_s=cluster.server_bytes_per_s or cluster.worker_bytes_per_s,
        pull=cluster.pull.native(),
        push=cluster.push.native(),
        sync=mode == "sync",
        pulls_are_answers=cluster.pulls == "answer",
        step_end=_STEP_ENDS[cluster.step_end],
        staleness=cluster.staleness,
        delay_bound=cluster.delay_bound,
        aggregates=cluster.aggregates,
        update_seconds_per_byte=cluster.update_s_per_byte,
        update_seconds=cluster.update_s,
        update_lanes=cluster.update_lanes,
        program_order=program_order,
        starts_s=[],
        spread_s=spread_s,
        seed=seed,
        steps=steps,
        recorded=recorded,
    )


def _check_bound(cluster: Cluster, mode: str) -> None:
    bound = cluster.delay_bound
    if bound is None:
        if cluster.aggregates:
            raise InvalidUsage("aggregation needs a delay bound; give one")
        return
    if bound < 0 or mode == "sync" or cluster.pulls != "answer":
        raise InvalidUsage(
            f"a delay bound of {bound} updates, {mode}, pulls by {cluster.pulls}; expected 0 or "
            "more, and asynchronous workers of hvd_order's servers"
        )


def rate_while_all_train(ends: Sequence[Sequence[float]], warm_up: int) -> float:
    """Steps/s of all workers together, while all of them train.

    That is between the end of the last worker's warm-up and the first worker's last step.

    Args:
        ends: by worker, when each step ended, in seconds of one clock.
        warm_up: steps of each worker that are left out, at least 1.
    """
    begin_s = max(each[warm_up - 1] for each in ends)
    end_s = min(each[-1] for each in ends)
    if end_s <= begin_s:  # a worker so slow that the others were done: its own steps count
        slow = min(ends, key=len)
        return (len(slow) - warm_up) * len(ends) / (slow[-1] - slow[warm_up - 1])
    done = sum(_done(each, end_s) - _done(each, begin_s) for each in ends)
    return done / (end_s - begin_s)


def _done(ends: Sequence[float], at_s: float) -> float:
    """Steps that a worker has done at a time, and the part of the one that it is in.

    Without that part synchronous workers, whose ends lie close together, would lose a step each.
    """
    count = bisect_right(ends, at_s)
    if count in (0, len(ends)):
        return count
    return count + (at_s - ends[count - 1]) / (ends[count] - ends[count - 1])


def _interval(values: Sequence[float]) -> tuple[float, float, float]:
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, mean, mean
    freedom = len(values) - 1
    quantile = _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else 1.96
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return mean, max(0.0, mean - half), mean + half


def predict_all_reduce(
    graph: Graph,
    compute_s: Sequence[float],
    workers: int,
    bytes_per_s: float,
    latency_s: float = USUAL_LATENCY_S,
    seed: int = 0,
    coded: Mapping[str, int] | None = None,
) -> Throughput:
    """Predicts a job with a ring all-reduce, ordered by hvd_order with settings for the link.

    In each of some draws every worker gets the speed of a measured step. The steps of all workers
    wait for the slowest, so more workers lose more to variation.

    Args:
        graph: of one worker's step, median times.
        compute_s: computation of each measured step, as of `WorkerStep`: without updates.
        bytes_per_s: of each worker's link, each way.
        coded: gradients that travel in 8 bits, and their bytes then, as of `coded_bytes`.

    Raises:
        InvalidUsage: less than one worker, or no bandwidth.
    """
    if workers < 1 or not bytes_per_s > 0:
        raise InvalidUsage(f"{workers} workers on links of {bytes_per_s} bytes/s; expected more")
    mean_s = statistics.fmean(compute_s)
    draw = random.Random(seed)
    work = workload_of(graph, wire_bytes=coded)
    network = Network.of_ring(workers, bytes_per_s, latency_s)
    size_bytes = sum(p.size_bytes for p in gradient_transfers(graph))
    # The measured steps are without the optimizer's ops.
    counted = [op for op in graph.ops if op.phase != "update" or op.produces]
    scale = mean_s / max(math.fsum(op.duration_s for op in counted), 1e-300)
    rates = []
    for _ in range(_DRAWS):
        slowness = [scale * draw.choice(compute_s) / mean_s for _ in range(workers)]
        if workers == 1:
            rates.append(1 / (slowness[0] * graph.compute_s))
            continue
        link, schedule = network.all_reduce(), in_order(network, size_bytes)
        if coded:
            link, schedule = coded_transfers(network, schedule, clipped=False)
        # The others wait for the slowest one, whatever their speed.
        ranks = [statistics.median(slowness), max(slowness)]
        found = simulate(work, link, schedule, ranks=ranks, steps=8)
        rates.append(workers / found.steady_s)
    # A job's rate is over its steps one after the other, hence the harmonic mean.
    times = [1 / rate for rate in rates]
    mean, low, high = _interval(times)
    return Throughput(workers, 0, "allreduce", 1 / mean, 1 / high, 1 / max(low, 1e-300))


def saturation(predicted: Sequence[Throughput]) -> Throughput:
    """The fewest workers within 5 % of the most steps/s: more of them gain nothing."""
    most = max(each.steps_per_s for each in predicted)
    enough = [each for each in predicted if each.steps_per_s >= _GAIN * most]
    return min(enough, key=lambda each: each.workers)
