"""Training on a device and in one process, whose weights are compared."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import hvd_order.torch as hvd
from hvd_order.tools.demo.gpt import Gpt, GptConfig, next_token_loss

__all__ = ["CLIPS", "OPTIMIZERS", "compare", "compare_ranks", "train"]

_CONFIG = GptConfig(vocabulary=64, context=16, layers=2, heads=2, width=32)
_STEPS = 12
_TOLERANCE = 1e-6  # relative, in float64

Clip = Callable[[list[Tensor]], Any]
CLIPS: dict[str, Clip] = {
    "": lambda parameters: None,
    "norm": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.5),
    "infinity norm": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.01, math.inf),
    "value": lambda parameters: nn.utils.clip_grad_value_(parameters, 0.001),
}
OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], Optimizer]] = {
    "SGD": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "SGD fused": lambda parameters: SGD(
        parameters, lr=0.1, momentum=0.9, weight_decay=0.01, fused=True
    ),
    "AdamW foreach": lambda parameters: AdamW(parameters, lr=1e-2, foreach=True),
    "AdamW fused": lambda parameters: AdamW(parameters, lr=1e-2, fused=True),
}


def compare(
    device: torch.device, optimizer: str, clip: str, scaled: bool = False, sharded: bool = False
) -> None:
    """The weights equal one process's, relative to each parameter's largest element."""
    ours = train(device, optimizer, clip, scaled=scaled, sharded=sharded)
    alone = train(device, optimizer, clip, scaled=scaled, distributed=False)
    case = f"{optimizer}, {clip}{', scaled' if scaled else ''}{', sharded' if sharded else ''}"
    error = max(
        float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, alone, strict=True)
    )
    assert error <= _TOLERANCE, f"{case}: {error:g} off one process"
    compare_ranks(ours, case)


def train(
    device: torch.device, name: str, clip: str, *, scaled: bool = False, sharded: bool = False,
    distributed: bool = True, dtype: torch.dtype = torch.float64,
) -> list[Tensor]:  # fmt: skip
    """Weights after some steps: on this rank's share of the batch, or on all of it."""
    torch.manual_seed(7)
    model = Gpt(_CONFIG).to(device, dtype)
    parameters = list(model.parameters())
    optimizer: Any = OPTIMIZERS[name](parameters)
    rank, size = (hvd.rank(), hvd.size()) if distributed else (0, 1)
    if distributed:
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), sharded=sharded
        )
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
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
        CLIPS[clip](parameters)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()
    if distributed:
        optimizer.flush()
    return [parameter.detach().clone() for parameter in parameters]


def compare_ranks(weights: Iterable[Tensor], case: str) -> None:
    """The weights must be the same on all ranks, to the bit."""
    digest = hashlib.sha256()
    for tensor in weights:
        digest.update(tensor.double().cpu().contiguous().numpy().tobytes())  # numpy has no bfloat16
    assert len(set(hvd.allgather_object(digest.hexdigest()))) == 1, f"{case}: the ranks differ"
