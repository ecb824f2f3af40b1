"""NCCL with one rank: the engine straight on a process group, for what one GPU can show."""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist
from busy import Busy
from finding import Finding

from benchmarks.runner.ranks import finish
from hvd_order._native import _torch as native

_BUSY_S = 0.3
_BYTES = 8 * 2**20
_SLICE_BYTES = 2 * 2**20
_ROUNDS = 30
_WARM_UP = 5


def check_readiness(device: torch.device) -> Finding:
    """A hook that fires long before its kernel ends neither blocks nor lets the slice go.

    On the default stream and on another one.
    """
    layout = native.SliceLayout([("gradient", _BYTES, 0)], _SLICE_BYTES)
    engine, transport = _start(device)
    flat = torch.zeros(_BYTES // 4, device=device)
    transport.set_buffers(0, [flat], layout)
    engine.add_model(0, layout)
    busy = Busy(device)
    native.tensor_ready(engine, transport, 0, 0, flat)  # NCCL connects at the first use
    engine.wait(0, 0)

    blocked_s = 0.0
    for number, stream in enumerate(
        (torch.accelerator.current_stream(device), torch.Stream(device))
    ):
        value = torch.full_like(flat, number + 1)
        finish(device)
        engine.take_events()
        engine.start_recording()
        with stream:
            begin_ns = time.monotonic_ns()
            busy.enqueue(_BUSY_S)
            flat.copy_(value)
            native.tensor_ready(engine, transport, 0, 0, flat)
            hook_s = (time.monotonic_ns() - begin_ns) / 1e9
            pending = engine.stages(0)[0]
        engine.wait(0, 0)
        engine.stop_recording()
        assert pending == 1, "the gradient was summed while its kernel was still running"
        assert hook_s < _BUSY_S / 2, f"the hook blocked for {hook_s:.3f} s"
        # After the wait, whoever asks on whatever stream sees the sum.
        assert torch.equal(flat, value), "the sum is not what the kernel wrote"
        events = engine.take_events()
        assert len(events) == len(layout.slices), f"{len(events)} slices were recorded"
        first_s = (min(event.ready_ns for event in events) - begin_ns) / 1e9
        assert first_s > 0.8 * _BUSY_S, (
            f"a slice was ready after {first_s:.3f} s, its kernel ends after {_BUSY_S} s"
        )
        assert all(event.ready_ns <= event.issued_ns <= event.done_ns for event in events)
        blocked_s = max(blocked_s, hook_s)
    engine.shutdown()
    dist.destroy_process_group()
    text = f"the hook took {1e3 * blocked_s:.1f} ms, its kernel {1e3 * _BUSY_S:.0f} ms"
    return Finding(text, {"hook_s": blocked_s})


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
        engine, transport = _start(device, name == "planned")
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
                native.tensor_ready(engine, transport, 0, i, buffer)
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


def _start(
    device: torch.device, planned: bool = False
) -> tuple[native.Engine, native.C10dTransport]:
    """An engine of one rank on a process group of its own."""
    if not dist.is_initialized():
        backend = {"cuda": "nccl", "cpu": "gloo"}.get(device.type, device.type)
        bound = {"device_id": device} if device.type == "cuda" else {}
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **bound)
    transport = native.C10dTransport(dist.group.WORLD)
    engine = native.Engine(
        rank=0,
        size=1,
        agreement=native.AgreementKind.PLANNED if planned else native.AgreementKind.LEADER,
        policy=native.Policy.PLANNED if planned else native.Policy.PRIORITY,
        credit_bytes=4 * _SLICE_BYTES,
        timeout_s=60,
        stall_warning_s=30,
        transport=transport,
        control=None,
    )
    return engine, transport
