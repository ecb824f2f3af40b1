"""The same weights however the device is waited for."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from finding import Finding
from torch import nn

import hvd_order.torch as hvd

DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
_STEPS = 25


def train_plain(device: torch.device) -> Finding:
    """Trains, and tells the weights' digest."""
    return _train(device, hvd.Compression.none)


def train_narrow(device: torch.device) -> Finding:
    """The same with sums in bfloat16, error feedback and clipping."""
    return _train(device, hvd.Compression.bf16_ef)


def _train(device: torch.device, compression: Any) -> Finding:
    torch.use_deterministic_algorithms(True, warn_only=device.type != "cuda")
    torch.manual_seed(5)
    width = 256
    layers = [
        nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()) for _ in range(8)
    ]
    model = nn.Sequential(*layers).to(device)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        named_parameters=model.named_parameters(),
        compression=compression,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    batches = torch.Generator().manual_seed(hvd.rank())
    for _ in range(_STEPS):
        x = torch.randn(64, width, generator=batches).to(device)
        model(x).square().mean().backward()
        if compression is hvd.Compression.bf16_ef:
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.flush()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    assert len(set(hvd.allgather_object(digest.hexdigest()))) == 1, "the ranks' weights differ"
    return Finding(digest.hexdigest())


def judge(found: Mapping[str, Finding]) -> Finding:
    """All ways to wait gave the same weights."""
    digests = {name: one.text for name, one in found.items()}
    if len(set(digests.values())) > 1:
        shown = ", ".join(f"{name} {digest[:8]}" for name, digest in digests.items())
        return Finding("", {}, f"the weights differ, by their digests: {shown}")
    return Finding(f"weights after {_STEPS} steps equal to the bit: {', '.join(digests)}")
