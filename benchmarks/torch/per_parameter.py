"""What forward, backward and ``step()`` cost for each parameter beside the plain optimizer.

Run it in two checkouts in turns to compare two versions:
``hvd-order run -np 2 python -m benchmarks.torch.per_parameter``. Rank 0 prints nanoseconds a
parameter: medians over the steps. Parameters are tiny, and all gradients travel in one slice.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

os.environ.setdefault("HVD_ORDER_SLICE_BYTES", "16MiB")

import torch

import hvd_order.torch as hvd
from benchmarks.runner.records.environment import environment
from benchmarks.runner.records.record import (
    DEFAULT_FOLDER,
    add_out_option,
    settings_of,
    write_record,
)

PARAMETERS = 400
ELEMENTS = 64
STEPS = 120
FIRST = 40  # steps in which the model is learnt


def times(distributed: bool) -> dict[str, float]:
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(ELEMENTS)) for _ in range(PARAMETERS)]
    optimizer = torch.optim.SGD(parameters, lr=1e-4 * hvd.size(), momentum=0.9)
    if distributed:
        optimizer = hvd.DistributedOptimizer(optimizer)
    taken: dict[str, list[float]] = {"forward": [], "backward": [], "step": []}
    x = torch.ones(ELEMENTS)
    for step in range(STEPS):
        optimizer.zero_grad()
        hvd.barrier()
        begin = time.perf_counter()
        total = torch.zeros(())
        for parameter in parameters:
            total = total + (parameter * x).sum()
        read = time.perf_counter()
        total.backward()
        computed = time.perf_counter()
        optimizer.step()
        end = time.perf_counter()
        if step >= FIRST:
            taken["forward"].append(read - begin)
            taken["backward"].append(computed - read)
            taken["step"].append(end - computed)
    return {name: statistics.median(values) for name, values in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_out_option(parser)
    options = parser.parse_args()
    found = environment()
    hvd.init()
    torch.set_num_threads(1)
    rounds = [(times(False), times(True)) for _ in range(5)]
    if hvd.rank() == 0:
        cost = {
            name: round(
                statistics.median(ours[name] - plain[name] for plain, ours in rounds)
                / PARAMETERS * 1e9
            )
            for name in rounds[0][0]
        }  # fmt: skip
        print(json.dumps({"nanoseconds a parameter, more than plain": cost}))
        write_record(
            "overhead", found, {**settings_of(options), "parameters": PARAMETERS},
            {"rounds": [{"plain": plain, "hvd_order": ours} for plain, ours in rounds]},
            {"ns_per_parameter": cost},
            options.out or DEFAULT_FOLDER / "overhead-per_parameter.json",
        )  # fmt: skip


main()
