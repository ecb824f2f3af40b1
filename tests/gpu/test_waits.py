"""The same weights however the device is waited for."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from gpu.on_device import DEVICES, run
from helpers.device.device_waits import WAITS
from torch import nn

import hvd_order.torch as hvd

# Codes have the same bits only with the same slices, which otherwise follow from the measured link.
_VARIABLES = {"HVD_ORDER_TUNE": "0", "HVD_ORDER_SLICE_BYTES": "512KiB",
              "HVD_ORDER_CREDIT_BYTES": "1MiB", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # fmt: skip
_STEPS = 25


@pytest.mark.long  # a minute or more on the test device
@pytest.mark.timeout(240)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("compression", ["none", "bf16_ef"])
def test_the_weights_are_the_same_however_the_device_is_waited_for(
    device: str, compression: str
) -> None:
    digests = {
        name: run(weights_digest, device, compression, ranks=2, backend="fastest",
                  env={**_VARIABLES, **way})
        for name, way in WAITS.items()
    }  # fmt: skip
    assert len(set(digests.values())) == 1, digests


def weights_digest(device: torch.device, compression_name: str) -> str:
    """Trains, and tells the weights' digest; bf16_ef with clipping."""
    compression: Any = getattr(hvd.Compression, compression_name)
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
    return digest.hexdigest()
