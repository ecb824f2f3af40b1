"""All-reduces in two halves: what is clipped or unscaled between them, and sharded state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from gpu.on_device import CUDA, run
from gpu.test_two_ranks import compare_ranks
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import hvd_order.torch as hvd
from hvd_order.tools.demo.gpt import Gpt, GptConfig, next_token_loss

_VARIABLES = {"HVD_ORDER_DEBUG": "split", "HVD_ORDER_TUNE": "0", "HVD_ORDER_SLICE_BYTES": "16384"}
"""Small slices, so that many are in flight."""
_CONFIG = GptConfig(vocabulary=64, context=16, layers=2, heads=2, width=32)
_STEPS = 12
_TOLERANCE = 1e-6  # relative, in float64
_NARROW_TOLERANCE = 0.02  # bfloat16 tells 1 from 1.008

Clip = Callable[[list[Tensor]], Any]
_CLIPS: dict[str, Clip] = {
    "norm": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.5),
    "infinity norm": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.01, math.inf),
    "value": lambda parameters: nn.utils.clip_grad_value_(parameters, 0.001),
}
_OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], Optimizer]] = {
    "SGD": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "AdamW": lambda parameters: AdamW(parameters, lr=1e-2),
    "AdamW fused": lambda parameters: AdamW(parameters, lr=1e-2, fused=True),
}


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_gradients_are_clipped_and_unscaled_between_the_halves(device: str, backend: str) -> None:
    run(clips_between_the_halves, device, ranks=2, backend=backend, env=_VARIABLES)


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_sharded_state_trains_the_same_weights(device: str, backend: str) -> None:
    run(shards_alike, device, ranks=2, backend=backend, env=_VARIABLES)


def clips_between_the_halves(device: torch.device) -> None:
    """Two ranks that clip and unscale unchanged, beside one process."""
    for optimizer in ("SGD", "AdamW fused"):
        for clip in _CLIPS:
            _compare(device, optimizer, clip)
    if device.type in ("cuda", "cpu"):  # torch.amp knows no others
        _compare(device, "SGD", "norm", scaled=True)


def shards_alike(device: torch.device) -> None:
    """The same with sharded optimizer state; bfloat16 weights are equal on all ranks."""
    for optimizer in _OPTIMIZERS:
        for clip in ("norm", "infinity norm"):
            _compare(device, optimizer, clip, sharded=True)
    if device.type in ("cuda", "cpu"):  # the test device has no layer norm of bfloat16
        narrow = _train(device, "SGD", "norm", dtype=torch.bfloat16, sharded=True)
        compare_ranks(narrow, "bfloat16")
        wide = _train(device, "SGD", "norm", dtype=torch.float32, distributed=False)
        off = max(float((a.float() - b).abs().max()) for a, b in zip(narrow, wide, strict=True))
        assert off < _NARROW_TOLERANCE, f"bfloat16 weights are {off:g} off those of float32"


def _compare(
    device: torch.device, optimizer: str, clip: str, scaled: bool = False, sharded: bool = False
) -> None:
    """Beside one process, relative to each parameter's largest element."""
    ours = _train(device, optimizer, clip, scaled=scaled, sharded=sharded)
    alone = _train(device, optimizer, clip, scaled=scaled, distributed=False)
    case = f"{optimizer}, {clip}{', scaled' if scaled else ''}{', sharded' if sharded else ''}"
    error = max(
        float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, alone, strict=True)
    )
    assert error <= _TOLERANCE, f"{case}: {error:g} off one process"
    compare_ranks(ours, case)


def _train(
    device: torch.device, name: str, clip: str, *, scaled: bool = False, sharded: bool = False,
    distributed: bool = True, dtype: torch.dtype = torch.float64,
) -> list[Tensor]:  # fmt: skip
    """Weights after some steps: on this rank's share of the batch, or on all of it."""
    torch.manual_seed(7)
    model = Gpt(_CONFIG).to(device, dtype)
    parameters = list(model.parameters())
    optimizer: Any = _OPTIMIZERS[name](parameters)
    rank, size = (hvd.rank(), hvd.size()) if distributed else (0, 1)
    if distributed:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), sharded=sharded
        )
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, enabled=scaled)
    generator = torch.Generator().manual_seed(3)
    for step in range(_STEPS):
        batch = torch.randint(_CONFIG.vocabulary, (8, _CONFIG.context + 1), generator=generator)
        mine = batch.chunk(size)[rank].to(device)
        loss = next_token_loss(model(mine[:, :-1]), mine[:, 1:])
        if scaled and step == 4 and rank == size - 1:
            loss = loss * math.inf  # all ranks leave this step out
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        _CLIPS[clip](parameters)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    if distributed:
        optimizer.flush()
    return [parameter.detach().clone() for parameter in parameters]
