"""What decisions cost: jobs a second, seconds a job, memory of a long trace. See README.md."""

from __future__ import annotations

import argparse
import random
import resource
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from benchmarks.runner.question import Answer, ask, option
from hvd_order.cluster.model.job import ClusterJob
from hvd_order.cluster.model.machines import Machines
from hvd_order.cluster.model.speed import TableSpeed
from hvd_order.cluster.policies.fifo import Fifo
from hvd_order.cluster.policies.pd_ors import PdOrs
from hvd_order.cluster.pricing.one_slot import Solver
from hvd_order.cluster.pricing.prices import limits_for
from hvd_order.cluster.simulate.simulator import Rules, simulate
from hvd_order.cluster.workloads.random_jobs import Ranges, paper_machines, random_jobs

_SLOT_S = 3600.0
_SLOTS = 20
_QUANTA = 30
_SOLVERS: tuple[Solver, ...] = ("rounding", "exact", "greedy")
_JOBS = 50
_LOAD = 0.9  # of 64 machines with 8 GPUs


def measure(options: argparse.Namespace) -> Answer:
    raw: dict[str, object] = {}
    for count in options.fifo_jobs:
        # In a process of its own, whose peak of memory is that of this trace.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            seconds, kib = pool.submit(fifo, count).result()
        raw[f"fifo, {count} jobs"] = {"seconds": seconds, "peak_kib": kib}
        print(f"fifo, {count:7} jobs: {count / seconds:6.0f} jobs/s, {kib / 1024:.0f} MiB at most")
    for solver in _SOLVERS:
        for machines in options.machines[: 3 if solver == "exact" else None]:
            jobs = list(random_jobs(_JOBS, 0, slots=_SLOTS, slot_s=_SLOT_S,
                                    ranges=Ranges(epoch_samples=(1_000, 25_000))))  # fmt: skip
            cluster = paper_machines(machines)
            prices = limits_for(jobs, cluster, _SLOT_S, _SLOTS)
            policy = PdOrs(cluster, _SLOTS, prices, _QUANTA, solver)
            rules = Rules(slot_s=_SLOT_S, until_s=_SLOTS * _SLOT_S)
            begin = time.process_time()
            result = simulate(jobs, cluster, policy, rules)
            seconds = (time.process_time() - begin) / _JOBS
            raw[f"pd-ors, {solver}, {machines} machines"] = {"seconds_a_job": seconds}
            print(f"pd-ors, {solver:8}, {machines:4} machines: {seconds:7.4f} s a job, "
                  f"utility {result.utility:.0f}", flush=True)  # fmt: skip
    return Answer(raw, name="cluster-scale")


def fifo(count: int) -> tuple[float, int]:
    """Processor time of a trace of so many jobs, and this process's peak of memory in KiB."""
    begin = time.process_time()
    summary = simulate(_stream(count), Machines.alike(64, {"gpu": 8, "cpu": 64}), Fifo())
    seconds = time.process_time() - begin
    assert summary.completed == count
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _stream(count: int) -> Iterator[ClusterJob]:
    """Jobs of 1 to 8 GPUs that take an hour in the mean."""
    draw = random.Random(0)
    sizes = (1, 1, 1, 2, 4, 8)
    gap_s = 3600 * sum(sizes) / len(sizes) / (64 * 8 * _LOAD)
    speeds = {size: TableSpeed({size: float(size)}) for size in sizes}
    now_s = 0.0
    for i in range(count):
        now_s += draw.expovariate(1 / gap_s)
        size = draw.choice(sizes)
        yield ClusterJob(f"job-{i}", now_s, size * draw.expovariate(1 / 3600) + 1, speeds[size],
                  {"gpu": 1}, requested=size, most=size)  # fmt: skip


if __name__ == "__main__":
    sys.exit(ask(
        "cluster", __doc__, measure,
        option("--fifo-jobs", [20_000, 100_000]),
        option("--machines", [10, 30, 100, 300, 1000]),
        quick={"fifo_jobs": [1000], "machines": [10]},
    ))  # fmt: skip
