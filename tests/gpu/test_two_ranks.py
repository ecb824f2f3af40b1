"""Two ranks on CUDA tensors, over Gloo on one GPU or over NCCL on two."""

from __future__ import annotations

import contextlib

import pytest
import torch
from gpu.on_device import CUDA, run
from gpu.training import OPTIMIZERS, compare
from helpers.device.opened import Busy

import hvd_order.torch as hvd
from benchmarks.runner.ranks import finish, new_host
from hvd_order._native import _torch as native

_ROUNDS = 20
_TENSORS = 6
_TENSOR_BYTES = 3 * 2**20  # slices of 2 MiB: some hold parts of two tensors


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_the_sum_sees_what_a_slow_kernel_writes_last(device: str, backend: str) -> None:
    run(sums_are_final, device, ranks=2, backend=backend)


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_two_ranks_train_the_weights_of_one_process(device: str, backend: str) -> None:
    run(trains_alike, device, ranks=2, backend=backend)


def sums_are_final(device: torch.device) -> None:
    """Slow kernels write the gradients long after the hooks; the sums hold what they wrote.

    Whoever waits then sees the sums, with every agreement.
    """
    busy = Busy(device)
    rank, size = hvd.rank(), hvd.size()
    elements = _TENSOR_BYTES // 4
    flat = torch.empty(_TENSORS * elements, device=device)
    views = flat.split(elements)
    pattern = (torch.arange(flat.numel(), device=device) % 1021).float()
    layout = native.SliceLayout([(f"t{i}", _TENSOR_BYTES, 0) for i in range(_TENSORS)], 2 * 2**20)
    # A stream that nothing else orders: only what the engine has really finished is right there.
    reader = torch.Stream(device) if device.type != "cpu" else contextlib.nullcontext()
    for agreement in ("leader", "negotiated", "planned"):
        host = new_host(agreement=agreement)
        plan = list(range(len(layout.slices)))[::-1] if agreement == "planned" else []
        host.add_model(0, layout, [flat], plan)
        for number in range(_ROUNDS):
            mine = pattern * ((rank + 1) * (number + 1))
            expected = pattern * (size * (size + 1) // 2 * (number + 1))
            flat.fill_(-1)  # what a slice that leaves too early carries
            finish(device)
            for tensor in reversed(range(_TENSORS)):
                # Sometimes one rank is the slow one, sometimes the other.
                busy.enqueue(0.01 if (number + tensor + rank) % 2 else 0.002)
                views[tensor].copy_(mine[tensor * elements : (tensor + 1) * elements])
                native.mark_ready_when_computed(
                    host.engine, host.transport, 0, tensor, views[tensor]
                )
            for tensor in range(_TENSORS):
                host.engine.wait(0, tensor)
                # Compared as soon as the engine says so, while later tensors still travel.
                right = expected[tensor * elements : (tensor + 1) * elements]
                with reader:
                    wrong = int((views[tensor] != right).sum())
                assert wrong == 0, (
                    f"{agreement}, round {number}, tensor {tensor}: {wrong} of {elements} elements "
                    f"are wrong on rank {rank} when the engine says that they are summed"
                )


def trains_alike(device: torch.device) -> None:
    """The weights of 2 ranks equal each other's to the bit, and one process's to 1e-6."""
    for optimizer in OPTIMIZERS:
        for clip in ("", "norm"):
            compare(device, optimizer, clip)
