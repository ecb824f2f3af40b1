"""What does it cost that a host waits for sums that a device receives? See README.md."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from helpers.device.device_waits import WAITS
from helpers.device.test_device import NAME, groups, load

import hvd_order.torch as hvd
from benchmarks.runner.question import Answer, ask, option
from benchmarks.runner.ranks import run_as_rank, run_ranks, slowest
from benchmarks.runner.records.report import table
from benchmarks.runner.records.summary import median_interval, paired_ratio
from benchmarks.runner.turns import turns
from hvd_order.engine import engine_host
from hvd_order.planning.bounds.bound import chain_optimum_s

SYSTEMS: Mapping[str, Mapping[str, str]] = {
    **WAITS,
    "as installed": {"HVD_ORDER_TUNE": "1"},  # enqueued, and what the trials of a job choose
}
_WARM_UP = 6  # steps; the order of readers is known after two
_LONGEST_TRIALS_S = 300  # short steps take more of them


class Layer(torch.nn.Module):
    """Occupies the device for a time in each direction, and reads one parameter."""

    def __init__(self, forward_s: float, backward_s: float, elements: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(elements, device=NAME))
        self._times = forward_s, backward_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Busy.apply(x, self.weight, *self._times)
        return result


class _Busy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, forward_s: float, backward_s: float
    ) -> torch.Tensor:
        ctx.backward_s = backward_s
        ctx.shape = weight.shape
        load().busy(forward_s)
        return x + weight[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        load().busy(ctx.backward_s)
        return gradients[0], torch.ones(ctx.shape, device=NAME), None, None


def measure(options: argparse.Namespace) -> Answer:
    load()  # builds it
    systems: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    optimum_s: list[float] = []
    settings: dict[str, list[str]] = {name: [] for name in SYSTEMS}
    for _, name in turns(list(SYSTEMS), options.rounds):
        result = run_ranks(2, sys.argv[1:], {"HVD_ORDER_TUNE": "0", **SYSTEMS[name]})
        systems[name].append(result["step_s"])
        settings[name].append(result["settings"])
        if name == "enqueued":
            optimum_s.append(result["optimum_s"])
    rows = []
    for name, seconds in systems.items():
        low, high = median_interval(seconds)
        rows.append([
            name, f"{1e3 * statistics.median(seconds):.1f}", f"{1e3 * low:.1f}-{1e3 * high:.1f}",
            paired_ratio(seconds, optimum_s), paired_ratio(seconds, systems["enqueued"]),
        ])  # fmt: skip
    print(*table(["wait", "step ms", "95 %", "/ optimum", "/ enqueued"], rows), sep="\n")
    over = {name: paired_ratio(seconds, optimum_s).to_json() for name, seconds in systems.items()}
    return Answer(
        {"seconds": systems, "optimum_s": optimum_s, "settings": settings}, {"over_optimum": over}
    )


def in_rank(options: argparse.Namespace) -> None:
    load()
    dist.init_process_group(f"cpu:gloo,{NAME}:{NAME}")
    run_as_rank(lambda _: train(options), options.worker, "cpu")


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Trains; returns the median step and the optimum of the same chain, in seconds."""
    device = load()
    seconds = options.layer_ms / 1e3
    model = torch.nn.Sequential(
        *(Layer(seconds, 2 * seconds, options.elements) for _ in range(options.layers))
    )
    device.synchronize()
    device.set_delays(0, launch_us=options.launch_us)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size())
    local_s = _step_s(model, optimizer, options.steps)
    wire_s = options.ratio * 3 * seconds
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    host = engine_host.running_host()
    assert host is not None
    for group in groups():
        group.set_link(0.0, wire_s / (4 * options.elements))
    step_s = _step_s(model, wrapped, options.steps, settled=lambda: host.tuning_ended)
    part_s = local_s / options.layers
    optimum_s = chain_optimum_s(
        [part_s / 3] * options.layers, [2 * part_s / 3] * options.layers,
        [wire_s] * options.layers,
    )  # fmt: skip
    return {
        "step_s": step_s,
        "optimum_s": optimum_s,
        "local_s": local_s,
        "settings": str(host.slice_settings),
    }


def _step_s(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    settled: Callable[[], bool] = lambda: True,
) -> float:
    """Seconds of a step on the slower rank: of all steps together, as the host runs ahead.

    Args:
        settled: whether trials of settings are over; the same on all ranks after the same step.
    """
    x = torch.zeros(1, device=NAME, requires_grad=True)

    def step() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    warm_up, latest_s = 0, time.monotonic() + _LONGEST_TRIALS_S
    while warm_up < _WARM_UP or not settled():
        step()
        warm_up += 1
        assert time.monotonic() < latest_s, "the trials do not end"
    load().synchronize()
    begin_s = time.monotonic()
    for _ in range(steps):
        step()
    load().synchronize()
    return slowest([(time.monotonic() - begin_s) / steps])[0]


if __name__ == "__main__":
    sys.exit(ask(
        "device_wait", __doc__, measure,
        option("--layers", 12),
        option("--layer-ms", 2.0, "forward; backward is twice"),
        option("--elements", 65536, "of each layer's parameter"),
        option("--ratio", 1.0, "transfer / computation"),
        option("--launch-us", 100, "from a launch to its start"),
        option("--steps", 20),
        option("--rounds", 7),
        rank=in_rank, quick={"rounds": 1, "steps": 5, "layers": 3},
    ))  # fmt: skip
