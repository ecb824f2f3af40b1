"""Second question: how far a training step is from its bound, and what a late gradient does.

Sleep stands for compute, so that only communication needs the processor. A step's forward reads
the layers first to last and waits for each one's own gradients; its backward makes gradients last
to first. Compute is paced by a clock of its own: what one sleep oversleeps the next one makes up.
"""

from __future__ import annotations

import argparse
import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import hvd_order.torch as hvd
from benchmarks.engine.agreement.exchanges import Exchange, LikeDdp, Ordered
from benchmarks.engine.agreement.fluid import Stage, fluid_s
from benchmarks.runner.ranks import new_host, seconds_of, slowest
from benchmarks.runner.turns import turns
from hvd_order.engine.job import process
from hvd_order.tools.demo.gpt import Gpt, GptConfig
from hvd_order.torch.collectives.compression import Compression
from hvd_order.torch.parameters.entry import ParameterEntry
from hvd_order.torch.sums.gradient_buffers import GradientBuffers

STRAGGLERS = ("none", "leader", "follower")
_SLICE_BYTES = 2 * 2**20  # unless HVD_ORDER_SLICE_BYTES says otherwise
_BLOCKED_S = 50e-6  # a wait that took longer really waited
_CPU = torch.device("cpu")


class Delays:
    """Which gradient of which step one rank has late: one a step, large ones more often.

    Like a copy from elsewhere or a branch that one rank takes: the gradients after it are on time.
    """

    def __init__(self, sizes_bytes: Sequence[int], delay_s: float, seed: int) -> None:
        self._sizes = sizes_bytes
        self._delay_s = delay_s
        self._seed = seed
        self._tensors = range(len(sizes_bytes))

    def of(self, step: int, tensor: int) -> float:
        draw = random.Random(1000 * self._seed + step)
        late = draw.choices(self._tensors, weights=self._sizes)[0]
        return self._delay_s if tensor == late else 0.0


class Pacer:
    """Sleeps so that compute takes its time and neither more nor less."""

    def __init__(self) -> None:
        self._now = time.perf_counter()

    def compute(self, seconds: float) -> None:
        self._now += seconds
        left = self._now - time.perf_counter()
        if left > 0:
            time.sleep(left)

    def waited(self, begin: float) -> None:
        """A wait since ``begin`` is over: time lost in it is not made up for."""
        now = time.perf_counter()
        if now - begin > _BLOCKED_S:
            self._now = max(self._now, now)


def run_steps(
    exchange: Exchange, stages: Sequence[Stage], steps: int, delays: Delays | None
) -> None:
    """``steps`` steps; returns when the last gradient is summed."""
    pacer = Pacer()
    late: dict[int, threading.Timer] = {}

    def wait(stage: Stage) -> None:
        for tensor in stage.tensors:
            if tensor in late:  # to the engine, what is not ready yet is not under way
                late.pop(tensor).join()
            exchange.wait(tensor)

    for step in range(steps):
        for stage in stages:
            begin = time.perf_counter()
            if step > 0:
                wait(stage)
                pacer.waited(begin)
            pacer.compute(stage.forward_s)
        for stage in reversed(stages):
            pacer.compute(stage.backward_s)
            for tensor in stage.tensors:
                delay_s = delays.of(step, tensor) if delays else 0.0
                if delay_s > 0:
                    late[tensor] = threading.Timer(delay_s, exchange.ready, (tensor,))
                    late[tensor].start()
                else:
                    exchange.ready(tensor)
        begin = time.perf_counter()
        exchange.end_of_backward()
        pacer.waited(begin)
    for stage in stages:
        wait(stage)


def measure_steps(options: argparse.Namespace, group: dist.ProcessGroup) -> dict[str, Any]:
    """Seconds a step by straggler, variant and round, with the bounds for each round."""
    config = process.current().config
    model = Gpt(GptConfig(layers=options.layers, width=options.width))
    entries = [ParameterEntry(parameter, name) for name, parameter in model.named_parameters()]
    buffers = GradientBuffers(entries, Compression.none, config.slice_bytes or _SLICE_BYTES)
    layout, flat = buffers.layout, buffers.flat
    sizes_bytes = [entry.wire.numel() * 4 for entry in entries]
    wire_s = _saturated_s(group, LikeDdp(group, layout, flat), len(entries), options)
    stages = _stages(entries, options.compute * wire_s)
    compute_s = sum(stage.forward_s + stage.backward_s for stage in stages)

    exchanges: dict[str, Exchange] = {"like DDP": LikeDdp(group, layout, flat)}
    for kind in options.agreements:
        exchanges[kind] = Ordered(new_host(agreement=kind), layout, flat, kind == "planned")
    late_rank = {"none": -1, "leader": 0, "follower": hvd.size() - 1}
    results: dict[str, Any] = {}
    right = True
    for straggler in STRAGGLERS:
        seconds: dict[str, list[float]] = {name: [] for name in exchanges}
        bounds: list[float] = []
        for number, name in turns(list(exchanges), options.warm_up + options.rounds):
            delays = Delays(sizes_bytes, options.late * compute_s, seed=number)
            mine = delays if hvd.rank() == late_rank[straggler] else None
            for buffer in flat:
                buffer.fill_(1)
            taken = seconds_of(
                lambda name=name, mine=mine: run_steps(  # type: ignore[misc]
                    exchanges[name], stages, options.steps, mine
                ),
                _CPU,
            )
            # Each step sums once more what the last one left: one slice too few or too many shows.
            right &= all(bool((b == float(hvd.size()) ** options.steps).all()) for b in flat)
            if number >= options.warm_up:
                seconds[name].append(taken / options.steps)
        for number in range(options.warm_up, options.warm_up + options.rounds):
            delays = Delays(sizes_bytes, options.late * compute_s, seed=number)
            late = delays.of if straggler != "none" else (lambda step, tensor: 0.0)
            rate = sum(sizes_bytes) / wire_s
            bounds.append(fluid_s(stages, sizes_bytes, rate, options.steps, late) / options.steps)
        results[straggler] = {
            "seconds": {name: slowest(values) for name, values in seconds.items()},
            "fluid_s": bounds,
        }
    return {
        "bytes": sum(sizes_bytes),
        "tensors": len(entries),
        "slices": len(layout.slices),
        "wire_s": wire_s,
        "compute_s": compute_s,
        "serial_s": wire_s + compute_s,
        "stragglers": results,
        "right": right,
    }


def _saturated_s(
    group: dist.ProcessGroup, plain: LikeDdp, tensors: int, options: argparse.Namespace
) -> float:
    """Median time of all slices issued at once: what the link can do."""

    def all_at_once() -> None:
        for tensor in reversed(range(tensors)):
            plain.ready(tensor)
        plain.end_of_backward()

    times = [seconds_of(all_at_once, _CPU) for _ in range(options.warm_up + options.rounds)]
    return sorted(slowest(times)[options.warm_up :])[options.rounds // 2]


def _stages(entries: Sequence[ParameterEntry], compute_s: float) -> list[Stage]:
    """Modules in consumption order; compute by size, backward twice as long as forward."""
    owners = [entry.name.rpartition(".")[0] for entry in entries]
    total = sum(entry.parameter.numel() for entry in entries)
    stages = []
    for owner in dict.fromkeys(owners):
        tensors = tuple(i for i, name in enumerate(owners) if name == owner)
        share = sum(entries[i].parameter.numel() for i in tensors) / total
        stages.append(Stage(tensors, share * compute_s / 3, share * compute_s * 2 / 3))
    return stages
