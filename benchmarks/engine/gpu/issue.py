"""From a gradient to its exchange, on one rank with NCCL."""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist
from helpers.device.opened import engine_alone

from benchmarks.engine.gpu.finding import Finding
from benchmarks.runner.ranks import finish
from hvd_order._native import _torch as native

_BYTES = 8 * 2**20
_SLICE_BYTES = 2 * 2**20
_ROUNDS = 30
_WARM_UP = 5


def check_issue_cost(device: torch.device) -> Finding:
    """From a gradient to its exchange: a slice alone, one of many, and bare all-reduces.

    With an order that the leader tells, and with a planned one, issued behind events.
    """
    count = _BYTES // _SLICE_BYTES
    buffers = [torch.zeros(_SLICE_BYTES // 4, device=device) for _ in range(count)]
    layout = native.SliceLayout(
        [(f"gradient {i}", _SLICE_BYTES, i) for i in range(count)], _SLICE_BYTES
    )
    figures: dict[str, float] = {}
    for name in ("leader", "planned"):
        engine, transport = engine_alone(device, name == "planned")
        transport.set_issues_ahead(name == "planned")
        transport.set_buffers(0, buffers, layout)
        engine.add_model(0, layout, list(range(count)) if name == "planned" else [])
        engine.start_recording()
        rounds = []
        for number in range(_ROUNDS):
            engine.take_events()
            finish(device)
            begin = time.perf_counter()
            for i, buffer in enumerate(buffers):
                buffer.add_(1)
                native.mark_ready_when_computed(engine, transport, 0, i, buffer)
            for i in range(count):
                engine.wait(0, i)
            finish(device)
            if number >= _WARM_UP:
                rounds.append((time.perf_counter() - begin) / count)
                figures.setdefault(f"{name}_first_issue_s", 0.0)
                first = min(engine.take_events(), key=lambda event: event.ready_ns)
                figures[f"{name}_first_issue_s"] += (first.issued_ns - first.ready_ns) / 1e9
        figures[f"{name}_slice_s"] = statistics.median(rounds)
        figures[f"{name}_first_issue_s"] /= len(rounds)
        engine.shutdown()
    rounds = []
    for _ in range(_ROUNDS):
        finish(device)
        begin = time.perf_counter()
        for buffer in buffers:
            buffer.add_(1)
        works = [dist.all_reduce(buffer, async_op=True) for buffer in buffers]
        for work in works:
            work.wait()
        finish(device)
        rounds.append((time.perf_counter() - begin) / count)
    figures["bare_slice_s"] = statistics.median(rounds[_WARM_UP:])
    dist.destroy_process_group()
    us = {name: f"{1e6 * seconds:.0f} us" for name, seconds in figures.items()}
    return Finding(
        f"a slice of many: leader {us['leader_slice_s']}, planned {us['planned_slice_s']}, bare "
        f"all-reduce {us['bare_slice_s']}; from ready to issued: leader "
        f"{us['leader_first_issue_s']}, planned {us['planned_first_issue_s']}",
        figures,
    )
