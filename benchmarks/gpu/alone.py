"""NCCL with one rank: the engine straight on a process group, for what one GPU can show."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from busy import Busy

from hvd_order import _torch as native

_BUSY_S = 0.3
_BYTES = 8 * 2**20
_SLICE_BYTES = 2 * 2**20


def check_readiness(device: torch.device) -> str:
    """A hook that fires long before its kernel ends neither blocks nor lets the slice go.

    On the default stream and on another one.
    """
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device
    )  # fmt: skip
    transport = native.C10dTransport(dist.group.WORLD)
    engine = native.Engine(
        rank=0,
        size=1,
        agreement=native.AgreementKind.LEADER,
        policy=native.Policy.PRIORITY,
        credit_bytes=4 * _SLICE_BYTES,
        timeout_s=60,
        stall_warning_s=30,
        transport=transport,
        control=None,
    )
    flat = torch.zeros(_BYTES // 4, device=device)
    layout = native.SliceLayout([("gradient", _BYTES, 0)], _SLICE_BYTES)
    transport.set_buffers(0, [flat], layout)
    engine.add_model(0, layout)
    busy = Busy(device)
    native.tensor_ready(engine, transport, 0, 0, flat)  # NCCL connects at the first use
    engine.wait(0, 0)

    blocked_s = 0.0
    for number, stream in enumerate((torch.cuda.default_stream(device), torch.cuda.Stream(device))):
        value = torch.full_like(flat, number + 1)
        torch.cuda.synchronize(device)
        engine.take_events()
        engine.start_recording()
        with torch.cuda.stream(stream):
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
    return f"the hook took {1e3 * blocked_s:.1f} ms, its kernel {1e3 * _BUSY_S:.0f} ms"
