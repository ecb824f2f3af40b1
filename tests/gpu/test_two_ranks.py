"""Two ranks on CUDA tensors, over Gloo on one GPU or over NCCL on two."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable

import pytest
import torch
from gpu.on_device import CUDA, run
from helpers.device.opened import Busy
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

import hvd_order.torch as hvd
from benchmarks.runner.ranks import finish, new_host
from hvd_order._native import _torch as native
from hvd_order.tools.demo.gpt import Gpt, GptConfig, next_token_loss

_ROUNDS = 20
_TENSORS = 6
_TENSOR_BYTES = 3 * 2**20  # slices of 2 MiB: some hold parts of two tensors
_TOLERANCE = 1e-6  # relative, in float64


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


Make = Callable[[Iterable[Tensor]], Optimizer]


def trains_alike(device: torch.device) -> None:
    """The weights of 2 ranks equal each other's to the bit, and one process's to 1e-6."""
    optimizers: dict[str, Make] = {
        "SGD": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
        "SGD fused": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, fused=True),
        "AdamW foreach": lambda p: AdamW(p, lr=1e-2, foreach=True),
        "AdamW fused": lambda p: AdamW(p, lr=1e-2, fused=True),
    }
    for name, make in optimizers.items():
        for clip in (False, True):
            alone = _train(device, make, clip, distributed=False)
            ours = _train(device, make, clip, distributed=True)
            error = max(
                float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, alone, strict=True)
            )
            case = f"{name}{', clipped' if clip else ''}"
            assert error <= _TOLERANCE, f"{case}: {error:g} off one process"
            compare_ranks(ours, case)


def _train(device: torch.device, make: Make, clip: bool, *, distributed: bool) -> list[Tensor]:
    """Weights after 12 steps: on this rank's share of the batch, or on all of it."""
    config = GptConfig(vocabulary=64, context=16, layers=2, heads=2, width=32)
    torch.manual_seed(7)
    model = Gpt(config).double().to(device)
    optimizer = make(model.parameters())
    rank, size = (hvd.rank(), hvd.size()) if distributed else (0, 1)
    if distributed:
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    generator = torch.Generator().manual_seed(3)
    for _ in range(12):
        batch = torch.randint(config.vocabulary, (8, config.context + 1), generator=generator)
        mine = batch.chunk(size)[rank].to(device)
        next_token_loss(model(mine[:, :-1]), mine[:, 1:]).backward()
        if clip:
            if distributed:
                optimizer.synchronize()  # type: ignore[attr-defined]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    if distributed:
        optimizer.flush()  # type: ignore[attr-defined]
    return [parameter.detach().clone() for parameter in model.parameters()]


def compare_ranks(weights: Iterable[Tensor], case: str) -> None:
    """The weights must be the same on all ranks, to the bit."""
    digest = hashlib.sha256()
    for tensor in weights:
        digest.update(tensor.double().cpu().contiguous().numpy().tobytes())  # numpy has no bfloat16
    assert len(set(hvd.allgather_object(digest.hexdigest()))) == 1, f"{case}: the ranks differ"
