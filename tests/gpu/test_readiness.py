"""A gradient is ready when its kernel has run, not when its hook fires: one rank, NCCL."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from gpu.on_device import DEVICES, run
from helpers.device.opened import Busy, engine_alone

from benchmarks.runner.ranks import finish
from hvd_order._native import _torch as native

_BUSY_S = 0.3
_BYTES = 8 * 2**20
_SLICE_BYTES = 2 * 2**20


@pytest.mark.parametrize("device", DEVICES)
def test_a_gradient_is_ready_when_its_kernel_has_run(device: str) -> None:
    run(is_ready_late, device, backend="nccl")


def is_ready_late(device: torch.device) -> None:
    """A hook that fires long before its kernel ends neither blocks nor lets the slice go.

    On the default stream and on another one.
    """
    layout = native.SliceLayout([("gradient", _BYTES, 0)], _SLICE_BYTES)
    engine, transport = engine_alone(device)
    flat = torch.zeros(_BYTES // 4, device=device)
    transport.set_buffers(0, [flat], layout)
    engine.add_model(0, layout)
    busy = Busy(device)
    native.mark_ready_when_computed(engine, transport, 0, 0, flat)  # NCCL connects at the first use
    engine.wait(0, 0)

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
            native.mark_ready_when_computed(engine, transport, 0, 0, flat)
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
    engine.shutdown()
    dist.destroy_process_group()
