"""How fast is the simulator? See README.md."""

from __future__ import annotations

import argparse
import statistics
import sys
import time

from benchmarks.runner.question import Answer, ask, option
from benchmarks.runner.workloads.profiles import PROFILES
from hvd_order.planning.predict.simulate import (
    AllReduceScenario,
    TransferSchedule,
    ddp,
    simulate,
)

_STEPS = 1000
_TARGET_S = 1.0
_MIB = 2**20


def measure(options: argparse.Namespace) -> Answer:
    profile = PROFILES["bert_large"]()
    work = profile.workload()
    link = AllReduceScenario.ring(8, 20e-6, 1.25e9)
    settings = TransferSchedule(4 * _MIB, 16 * _MIB, control_latency_s=50e-6)
    slices = len(work.layout(settings.slice_bytes).slices)
    buckets, arrival = ddp(work)
    planned = TransferSchedule(4 * _MIB, 16 * _MIB, "planned", "planned", plan=range(slices)[::-1])
    rows = {
        "leader, 8 equal ranks (the target's case)": lambda: simulate(
            work, link, settings, ranks=8, steps=_STEPS
        ),
        "negotiated": lambda: simulate(
            work,
            link,
            TransferSchedule(4 * _MIB, 16 * _MIB, agreement="negotiated"),
            ranks=8,
            steps=_STEPS,
        ),
        "planned": lambda: simulate(work, link, planned, ranks=8, steps=_STEPS),
        "like DDP, 25 MiB": lambda: simulate(buckets, link, arrival, ranks=8, steps=_STEPS),
        "leader, all 8 ranks simulated": lambda: simulate(
            work, link, settings, ranks=8, steps=_STEPS, every_rank=True
        ),
    }
    seconds: dict[str, list[float]] = {}
    for name, run in rows.items():
        took = seconds[name] = []
        for _ in range(options.runs):
            begin = time.process_time()
            run()
            took.append(time.process_time() - begin)
        print(f"{name:45} {statistics.median(took):7.3f} s")
    medians = {name: statistics.median(took) for name, took in seconds.items()}
    slow = medians[next(iter(rows))] >= _TARGET_S
    return Answer({"seconds": seconds}, {"seconds": medians},
                  {"model": "bert_large", "steps": _STEPS},
                  f"slower than {_TARGET_S} s" if slow else "")  # fmt: skip


if __name__ == "__main__":
    sys.exit(ask("simulate", __doc__, measure, option("--runs", 5), quick={"runs": 1}))
