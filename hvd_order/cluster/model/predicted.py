"""Speeds that the predictor finds from the profile of one worker."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Literal

from hvd_order.base.errors import InvalidUsage
from hvd_order.cluster.model.speed import TableSpeed
from hvd_order.planning.files.profile import Profile
from hvd_order.planning.predict.workers.calibration import calibrate
from hvd_order.planning.predict.workers.comparison import parse_counts
from hvd_order.planning.predict.workers.throughput import (
    Cluster,
    predict_all_reduce,
    predict_servers,
)
from hvd_order.planning.predict.workers.transmission import POLICIES
from hvd_order.planning.predict.workers.worker_step import WorkerStep, usual_slice_bytes

__all__ = ["predicted_speed"]


def predicted_speed(
    profile: Profile,
    worker_batch: int,
    most: int,
    mode: Literal["async", "sync", "allreduce"],
    *,
    inside_bytes_per_s: float,
    network_bytes_per_s: float,
    workers_per_server: int | None = None,
    latency_s: float = 50e-6,
) -> TableSpeed:
    """Samples/s of 1 to ``most`` workers, on one machine and over several.

    Each worker has the batch that was profiled, so the batch of the job grows with its workers.

    Args:
        profile: of one worker, with single steps (``hvd-order profile``).
        worker_batch: samples of the profiled step.
        inside_bytes_per_s, network_bytes_per_s: of a worker's link to others on its machine, and to
            other machines, each way.
        workers_per_server: with servers; one that does not divide the workers serves fewer.

    Raises:
        InvalidUsage: the profile holds no single steps or they do not vary, or the numbers are
            impossible.
    """
    if worker_batch < 1 or most < 1:
        raise InvalidUsage(
            f"a batch of {worker_batch}, at most {most} workers; expected at least 1"
        )
    if (mode == "allreduce") != (workers_per_server is None):
        raise InvalidUsage(f"mode {mode} and {workers_per_server} workers a server; all-reduce has "
                           "no servers, the other modes need them")  # fmt: skip
    usual = functools.partial(usual_slice_bytes, profile.parameters, network_bytes_per_s, latency_s)
    step = WorkerStep.from_profile(profile, slice_bytes=usual())
    if profile.servers is not None and mode != "allreduce":
        found = calibrate(step, profile.servers, latency_s)
        step = step if found is None else found.step
    graph = profile.graph("median")
    way = replace(POLICIES["ordered"], latency_s=latency_s)

    def samples_per_s(workers: int, bytes_per_s: float) -> float:
        if mode == "allreduce":
            found = predict_all_reduce(graph, step.compute_s, workers, bytes_per_s, latency_s)
        else:
            servers = -(-workers // (workers_per_server or 1))
            cluster = Cluster(bytes_per_s, pull=way, push=way)
            cut = step.in_slices(usual(workers)) if mode == "sync" else step
            found = predict_servers(cut, cluster, workers, servers, mode, seeds=1)
        return worker_batch * found.steps_per_s

    counts = parse_counts(f"1-{most}", "workers")
    return TableSpeed(
        {count: samples_per_s(count, inside_bytes_per_s) for count in counts},
        {count: samples_per_s(count, network_bytes_per_s) for count in counts},
    )
