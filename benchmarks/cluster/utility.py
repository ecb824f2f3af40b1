"""Total utility of policies by machines and jobs: the papers' experiment. See README.md."""

from __future__ import annotations

import argparse
import statistics
import sys

from benchmarks.runner.question import Answer, ask, option
from hvd_order.cluster.policies.registry import PolicyInputs, policy
from hvd_order.cluster.simulate.simulator import Rules, simulate
from hvd_order.cluster.workloads.random_jobs import Ranges, paper_machines, random_jobs

_SLOT_S = 3600.0
_SLOTS = 20
_MACHINES = (25, 50, 100, 200)
_JOBS = (25, 50, 100)
_INSIDE = (1.0, 2.0, 10.0, 50.0)  # rate within a machine over that of the network
_POLICIES = ("fifo", "drf", "dorm", "oasis", "pd-ors")
# A twentieth of the papers' samples: with all of them a job takes 1,500 worker-slots, and
# a hundred machines could hold a handful of jobs.
_EPOCH_SAMPLES = (1_000, 25_000)


def measure(options: argparse.Namespace) -> Answer:
    cells = [(f"{count} machines, 50 jobs", count, 50, 10.0) for count in _MACHINES]
    cells += [(f"50 machines, {count} jobs", 50, count, 10.0) for count in _JOBS if count != 50]
    cells += [(f"50 machines, 50 jobs, links within x{inside:g}", 50, 50, inside)
              for inside in _INSIDE if inside != 10]  # fmt: skip
    raw: dict[str, dict[str, list[float]]] = {}
    summary: dict[str, dict[str, float]] = {}
    for name, machines, jobs, inside in cells:
        raw[name] = {
            each: [_utility(each, machines, jobs, inside, seed) for seed in range(options.seeds)]
            for each in _POLICIES
        }
        mean = {each: statistics.fmean(values) for each, values in raw[name].items()}
        over = [p / o for p, o in zip(raw[name]["pd-ors"], raw[name]["oasis"], strict=True)]
        summary[name] = {**mean, "pd-ors over oasis": statistics.median(over)}
        print(f"{name:42}", "  ".join(f"{each} {value:7.1f}" for each, value in mean.items()),
              f"  pd-ors over oasis {statistics.median(over):.2f} "
              f"[{min(over):.2f}, {max(over):.2f}]", flush=True)  # fmt: skip
    return Answer({"utility": raw}, {"utility": summary}, {"slots": _SLOTS},
                  name="cluster-utility")  # fmt: skip


def _utility(name: str, machine_count: int, job_count: int, inside: float, seed: int) -> float:
    machines = paper_machines(machine_count)
    ranges = Ranges(epoch_samples=_EPOCH_SAMPLES, inside=inside)
    jobs = list(random_jobs(job_count, seed, slots=_SLOTS, slot_s=_SLOT_S, ranges=ranges))
    until_s = _SLOTS * _SLOT_S
    # Prices follow from other jobs of the same kind: the ones to come are not known.
    examples = list(random_jobs(50, 1000 + seed, slots=_SLOTS, slot_s=_SLOT_S, ranges=ranges))
    chosen = policy(name, PolicyInputs(machines, _SLOT_S, until_s, examples, seed))
    return simulate(jobs, machines, chosen, Rules(slot_s=_SLOT_S, until_s=until_s)).utility


if __name__ == "__main__":
    sys.exit(ask("cluster", __doc__, measure, option("--seeds", 5), quick={"seeds": 1}))
