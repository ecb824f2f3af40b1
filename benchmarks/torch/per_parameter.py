"""What do forward, backward and ``step()`` cost for each parameter, on two ranks? See README.md.

Parameters are tiny, and all gradients travel in one slice.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import torch

import hvd_order.torch as hvd
from benchmarks.runner.question import Answer, ask, option
from benchmarks.runner.ranks import run_as_rank, run_ranks

PARAMETERS = 400
ELEMENTS = 64
FIRST = 40  # steps in which the model is learnt


def times(distributed: bool, steps: int) -> dict[str, float]:
    """Medians over the steps."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(ELEMENTS)) for _ in range(PARAMETERS)]
    optimizer = torch.optim.SGD(parameters, lr=1e-4 * hvd.size(), momentum=0.9)
    if distributed:
        optimizer = hvd.DistributedOptimizer(optimizer)
    taken: dict[str, list[float]] = {"forward": [], "backward": [], "step": []}
    x = torch.ones(ELEMENTS)
    for step in range(FIRST + steps):
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


def in_rank(options: argparse.Namespace, _: torch.device) -> list[dict[str, Any]]:
    return [
        {"plain": times(False, options.steps), "hvd_order": times(True, options.steps)}
        for _ in range(options.rounds)
    ]


def measure(options: argparse.Namespace) -> Answer:
    rounds = run_ranks(2, sys.argv[1:], {"HVD_ORDER_SLICE_BYTES": "16MiB"})
    cost = {
        name: round(
            statistics.median(each["hvd_order"][name] - each["plain"][name] for each in rounds)
            / PARAMETERS * 1e9
        )
        for name in rounds[0]["plain"]
    }  # fmt: skip
    print(f"nanoseconds a parameter, more than plain: {cost}")
    return Answer({"rounds": rounds}, {"ns_per_parameter": cost}, {"parameters": PARAMETERS},
                  name="overhead-per_parameter")  # fmt: skip


if __name__ == "__main__":
    sys.exit(ask(
        "overhead", __doc__, measure,
        option("--rounds", 5),
        option("--steps", 80, "measured in each round"),
        quick={"rounds": 1, "steps": 5},
        rank=lambda options: run_as_rank(
            lambda device: in_rank(options, device), options.worker, "cpu"
        ),
    ))  # fmt: skip
