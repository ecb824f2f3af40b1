"""Elastic policies on Pollux' workload 6: mean completion time. See README.md."""

from __future__ import annotations

import argparse
import os
import statistics
import sys

from benchmarks.runner.question import Answer, ask, option
from hvd_order.cluster.policies.registry import RANDOM, PolicyInputs, policy
from hvd_order.cluster.simulate.simulator import Rules, simulate
from hvd_order.cluster.workloads.load import DATA, load_jobs
from hvd_order.cluster.workloads.machines import parse_machines

_MACHINES = "16x4gpu"  # as Pollux' evaluation has them
_RESIZE_S = 30.0  # Pollux' own assumption for a restart
_POLICIES = ("fifo", "srtf", "finish-time", "optimus", "tiresias", "ones")
_METRICS = ("completion_mean_s", "completion_p99_s", "makespan_s", "changes")


def measure(options: argparse.Namespace) -> Answer:
    machines = parse_machines(_MACHINES)
    jobs = list(load_jobs(os.path.join(DATA, "pollux-workload-6.csv")))
    raw: dict[str, dict[str, list[float]]] = {}
    for name in options.policies:
        raw[name] = {key: [] for key in _METRICS}
        for seed in range(options.seeds if name in RANDOM else 1):
            chosen = policy(name, PolicyInputs(machines, None, float("inf"), jobs, seed))
            rules = Rules(start_s=_RESIZE_S, resize_s=_RESIZE_S)
            metrics = simulate(jobs, machines, chosen, rules).metrics()
            for key, values in raw[name].items():
                values.append(metrics[key])
        mean = {key: statistics.fmean(values) for key, values in raw[name].items()}
        print(f"{name:12} " + ", ".join(f"{key} {value:.0f}" for key, value in mean.items()),
              flush=True)  # fmt: skip
    return Answer(raw, name="cluster-workload6")


if __name__ == "__main__":
    sys.exit(ask(
        "cluster", __doc__, measure,
        option("--seeds", 3),
        option("--policies", list(_POLICIES)),
        quick={"seeds": 1, "policies": ["fifo"]},
    ))  # fmt: skip
