"""What a simulated step of the predictor costs, by the number of workers. See README.md."""

from __future__ import annotations

import argparse
import random
import sys
import time

from benchmarks.planning.prediction.model import graph_of
from benchmarks.runner.question import Answer, ask
from benchmarks.runner.workloads.profiles import PROFILES, Profile
from hvd_order.planning.predict.workers.throughput import Cluster, predict_servers
from hvd_order.planning.predict.workers.worker_step import WorkerStep

_SERVERS = 4
_SLICE_BYTES = 512 << 10
_STEPS = {4: 1000, 16: 1000, 64: 1000, 256: 100, 1024: 10}  # of each worker, by their number
_SAMPLES = 50
_VARIATION = 0.2
_COMPUTE_S = 0.1
_BYTES_PER_S = 1.25e9


def measure(options: argparse.Namespace) -> Answer:
    profile = PROFILES["resnet50"]().scaled_to(_COMPUTE_S)
    graph, rows = graph_of(profile, [_recorded(profile, random.Random(i)) for i in range(_SAMPLES)])
    step = WorkerStep(graph, rows, slice_bytes=_SLICE_BYTES)
    seconds = {}
    for workers, steps in [*_STEPS.items()][: 1 if options.quick else None]:
        begin = time.process_time()
        predict_servers(step, Cluster(_BYTES_PER_S), workers, _SERVERS, seeds=1, steps=steps)
        taken = time.process_time() - begin
        seconds[f"{workers} workers, {steps} steps each"] = [taken]
        print(f"{workers:5} workers, {steps:4} steps each: {taken:6.2f} s, "
              f"{1e6 * taken / workers / steps:.0f} us a step")  # fmt: skip
    settings = {"model": "resnet50", "servers": _SERVERS, "pieces": len(step.tensor_bytes)}
    return Answer({"seconds": seconds}, settings=settings, name="prediction-speed")


def _recorded(profile: Profile, draw: random.Random) -> list[tuple[str, str, float, float]]:
    """A step's layers one after the other, each longer than its time by a random part."""
    events, now = [], 0.0
    forward = [(layer.name, "forward", layer.forward_s) for layer in profile.layers]
    backward = [(layer.name, "backward", layer.backward_s) for layer in reversed(profile.layers)]
    for name, kind, seconds in (*forward, *backward):
        end = now + seconds * (1 + _VARIATION * draw.random())
        events.append((name, kind, now, end))
        now = end
    return events


if __name__ == "__main__":
    sys.exit(ask("prediction", __doc__, measure, quick={}))
