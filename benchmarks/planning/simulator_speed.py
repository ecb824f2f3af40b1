"""How fast is the simulator? Prints a table; see README.md."""

from __future__ import annotations

import argparse
import statistics
import sys
import time

from benchmarks.runner.records.environment import started
from benchmarks.runner.records.record import add_out_option, settings_of, write_record
from benchmarks.runner.workloads.profiles import PROFILES
from hvd_order.planning.predict.simulate import (
    AllReduceScenario,
    TransferSchedule,
    ddp,
    simulate,
)

_STEPS = 1000
_RUNS = 5
_TARGET_S = 1.0
_MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_out_option(parser)
    options = parser.parse_args()
    found = started()
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
    print(f"bert_large: {len(profile.layers)} layers, {len(work.parameter_bytes)} parameters, "
          f"{sum(work.parameter_bytes) / 1e6:.0f} MB, {slices} slices of 4 MiB; "
          f"{_STEPS} steps, median of {_RUNS}")  # fmt: skip
    seconds: dict[str, list[float]] = {}
    for name, run in rows.items():
        took = seconds[name] = []
        for _ in range(_RUNS):
            begin = time.process_time()
            run()
            took.append(time.process_time() - begin)
        median = statistics.median(took)
        print(f"{name:45} {median:7.3f} s  [{min(took):.3f}, {max(took):.3f}]")
    medians = {name: statistics.median(took) for name, took in seconds.items()}
    settings = {**settings_of(options), "model": "bert_large", "steps": _STEPS}
    write_record("simulate", found, settings, {"seconds": seconds}, {"seconds": medians},
                 options.out)  # fmt: skip
    failed = medians[next(iter(rows))] >= _TARGET_S
    sys.exit(f"slower than {_TARGET_S} s" if failed else None)


if __name__ == "__main__":
    main()
