"""What order inside jobs and order between jobs gain, alone and together. See README.md."""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.runner.question import Answer, ask, option
from benchmarks.runner.records.summary import paired_ratio
from benchmarks.runner.workloads.profiles import PROFILES
from hvd_order.cluster.links.between import Between, sharing_of
from hvd_order.cluster.links.cassini import shifts_of
from hvd_order.cluster.links.jobs import LinkJob
from hvd_order.cluster.links.load import load_of
from hvd_order.cluster.links.shared import alone_s, simulate_shared
from hvd_order.cluster.links.step import Inside, step_of
from hvd_order.cluster.model.placement import JobPlacement
from hvd_order.planning.graph.graph import Graph
from hvd_order.planning.graph.synthetic import chain

INSIDE: tuple[Inside, ...] = ("buckets", "arrival", "ordered")
BETWEEN: tuple[Between, ...] = ("fair", "crux", "cassini")
MODELS = ("resnet50", "vgg16", "gpt2_small")
ITERATIONS = 20  # of the slowest job, were it to share each link with all others
INTERVALS = 50
SPEEDS = (1.0, 1.5, 2.0)  # devices' speeds, over the profiles' device; several kinds in a cluster


@dataclass(frozen=True)
class Mix:
    """Jobs and their machines."""

    graphs: tuple[Graph, ...]
    placements: tuple[JobPlacement, ...]
    seed: int

    def jobs(self, inside: Inside) -> list[LinkJob]:
        return [
            LinkJob(str(i), step_of(graph, inside), load_of(placement), placement.workers)
            for i, (graph, placement) in enumerate(zip(self.graphs, self.placements, strict=True))
        ]


def graph_of(model: str, speed: float) -> Graph:
    layers = PROFILES[model]().layers
    return chain(
        [layer.forward_s / speed for layer in layers],
        [layer.backward_s / speed for layer in layers],
        [layer.size_bytes for layer in layers],
    )


def draw_mix(seed: int, count: int, machines: int, slots: int, alike: bool) -> Mix | None:
    """Jobs of 2 to 4 workers on different machines; None: they do not fit.

    Args:
        alike: all jobs are the same one, so their iterations take equally long.
    """
    draw = random.Random(seed)
    kinds = [(draw.choice(MODELS), draw.choice(SPEEDS), draw.randint(2, 4)) for _ in range(count)]
    if alike:
        kinds = kinds[:1] * count
    free = [slots] * machines
    graphs, placements = [], []
    for model, speed, workers in kinds:
        graphs.append(graph_of(model, speed))
        room = [machine for machine in range(machines) if free[machine]]
        if len(room) < workers:
            return None
        chosen = draw.sample(room, workers)
        for machine in chosen:
            free[machine] -= 1
        placements.append(JobPlacement.of((machine, 1, 0) for machine in chosen))
    return Mix(tuple(graphs), tuple(placements), seed)


def of_mix(
    mix: Mix, inside: Inside, between: Between, capacity: Sequence[float]
) -> tuple[float, float]:
    """Utilisation of the workers, and iteration time over that alone in buckets: geometric mean."""
    jobs = mix.jobs(inside)
    link_s = [job.link_s(capacity) for job in jobs]
    until_s = ITERATIONS * max(
        one.step.compute_s
        + sum(s for job, s in zip(jobs, link_s, strict=True) if job.load.keys() & one.load.keys())
        for one in jobs
    )
    traces = simulate_shared(jobs, capacity, until_s, sharing_of(between, jobs, capacity, mix.seed))
    today = mix.jobs("buckets")
    busy, logs = 0.0, 0.0
    for job, trace, before in zip(jobs, traces, today, strict=True):
        busy += job.workers * job.step.compute_s / trace.iteration_s
        logs += math.log(
            trace.iteration_s
            / alone_s(before.step, before.link_s(capacity) / before.step.size_bytes)
        )
    return busy / sum(job.workers for job in jobs), math.exp(logs / len(jobs))


def accepted(mix: Mix, capacity: Sequence[float]) -> bool:
    """Whether CASSINI takes the placement, and some link is shared."""
    jobs = mix.jobs("buckets")
    shared = any(
        one.load.keys() & other.load.keys()
        for i, one in enumerate(jobs) for other in jobs[:i]
    )  # fmt: skip
    shortest_s = min(job.step.compute_s for job in jobs)
    return shared and shifts_of(jobs, capacity, shortest_s / INTERVALS) is not None


def measure(options: argparse.Namespace) -> Answer:
    raw: dict[str, dict[str, list[float]]] = {}
    summary: dict[str, dict[str, object]] = {}
    for gbit in options.gbit:
        capacity = [gbit * 1e9 / 8] * options.machines
        mixes, seed = [], 0
        while len(mixes) < options.mixes:
            mix = draw_mix(seed, options.jobs, options.machines, options.slots, options.alike)
            if mix is not None and accepted(mix, capacity):
                mixes.append(mix)
            seed += 1
        cells = {}
        for inside in INSIDE:
            for between in BETWEEN:
                cells[inside, between] = [of_mix(mix, inside, between, capacity) for mix in mixes]
        today = cells["buckets", "fair"]
        print(f"{gbit:g} Gbit/s, {len(mixes)} of {seed} mixes")
        for (inside, between), values in cells.items():
            used = paired_ratio([u for u, _ in values], [u for u, _ in today])
            slow = paired_ratio([s for _, s in values], [s for _, s in today])
            mean = sum(u for u, _ in values) / len(values)
            print(f"{inside} inside, {between} between: utilisation {mean:.3f}, over today {used}; "
                  f"iteration over today {slow}")  # fmt: skip
            name = f"{gbit:g} Gbit/s, {inside}, {between}"
            raw[name] = {"utilisation": [u for u, _ in values],
                         "iteration over alone": [s for _, s in values]}  # fmt: skip
            summary[name] = {"utilisation": mean, "utilisation over today": used.to_json(),
                             "iteration over today": slow.to_json()}  # fmt: skip
    return Answer(raw, summary, name="cluster-order-alike" if options.alike else "cluster-order")


if __name__ == "__main__":
    sys.exit(ask(
        "cluster", __doc__, measure,
        option("--mixes", 20),
        option("--jobs", 5),
        option("--machines", 8),
        option("--slots", 2, "workers of a machine"),
        option("--gbit", [10.0, 25.0, 50.0]),
        option("--alike", False, "all jobs of a mix are the same one"),
        quick={"mixes": 2, "gbit": [25.0]},
    ))  # fmt: skip
