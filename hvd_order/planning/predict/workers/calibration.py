"""What a step with servers takes longer than its computations and transfers say.

A profile has the durations of a worker's computations. A job has more: hooks of the gradient
exchange, reads that wait for updates, loading of data between two steps. The profiled job with
servers tells how much in all, as Li, Paolieri and Golubchik (ICPE 2020) take it from a job of one
worker and one server.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace

from hvd_order.planning.predict.workers.throughput import Cluster, predict_servers
from hvd_order.planning.predict.workers.transmission import POLICIES
from hvd_order.planning.predict.workers.worker_step import WorkerStep
from hvd_order.servers.costs import ServerCosts

__all__ = ["Calibration", "calibrate", "measured_cluster"]

_SEEDS = 2
_HALVINGS = 10


@dataclass(frozen=True)
class Calibration:
    """The step that reproduces the profiled job.

    Attributes:
        step: with the exchange time of each parameter.
        exchange_s: that time, for each parameter; 0 if the job was not slower than simulated.
        measured_s, simulated_s: a step of the profiled job; simulated without that time.
    """

    step: WorkerStep
    exchange_s: float
    measured_s: float
    simulated_s: float


def measured_cluster(costs: ServerCosts, latency_s: float) -> Cluster | None:
    """The links, servers and rules of the profiled job; None if its link cannot be told."""
    link = costs.link()
    if link is None:
        return None
    way = replace(POLICIES["ordered"], latency_s=latency_s)
    worker, server = costs.worker_end, costs.server_end
    return Cluster(
        link[0],
        pull=replace(way, receive_s_per_byte=worker.seconds_per_byte, receive_s=worker.seconds),
        push=replace(way, receive_s_per_byte=server.seconds_per_byte, receive_s=server.seconds),
        update_s_per_byte=costs.update.seconds_per_byte,
        update_s=costs.update.seconds,
    )


def calibrate(step: WorkerStep, costs: ServerCosts, latency_s: float) -> Calibration | None:
    """Finds the time of each parameter with which the simulated job takes as long as the real one.

    Args:
        step: of the profile.
        latency_s: of a message in the profiled job.

    Returns:
        None if the profile has no steps of the job, or not its link.
    """
    cluster = measured_cluster(costs, latency_s)
    if cluster is None or not costs.step_s:
        return None

    def simulated_s(exchange_s: float) -> float:
        found = predict_servers(
            step.with_exchange_time(exchange_s), cluster, costs.workers, costs.servers, costs.mode,
            _SEEDS,
        )  # fmt: skip
        return costs.workers / found.steps_per_s

    measured_s = statistics.fmean(costs.step_s)
    without_s = simulated_s(0.0)
    if without_s >= measured_s:
        return Calibration(step, 0.0, measured_s, without_s)
    # Computation alone then takes as long as the measured step.
    low, high = 0.0, measured_s / step.parameters
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if simulated_s(middle) < measured_s else (low, middle)
    return Calibration(step.with_exchange_time(high), high, measured_s, without_s)
