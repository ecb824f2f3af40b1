"""All-reduces in two halves: what is clipped or unscaled between them, and sharded state."""

from __future__ import annotations

import pytest
import torch
from gpu.on_device import CUDA, run
from gpu.training import compare, compare_ranks, train

_NARROW_TOLERANCE = 0.02  # bfloat16 tells 1 from 1.008
_VARIABLES = {"HVD_ORDER_DEBUG": "split", "HVD_ORDER_TUNE": "0", "HVD_ORDER_SLICE_BYTES": "16384"}
"""Small slices, so that many are in flight."""


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
        for clip in ("norm", "infinity norm", "value"):
            compare(device, optimizer, clip)
    if device.type in ("cuda", "cpu"):  # torch.amp knows no others
        compare(device, "SGD", "norm", scaled=True)


def shards_alike(device: torch.device) -> None:
    """The same with sharded optimizer state; bfloat16 weights are equal on all ranks."""
    for optimizer in ("SGD", "AdamW foreach", "AdamW fused"):
        for clip in ("norm", "infinity norm"):
            compare(device, optimizer, clip, sharded=True)
    if device.type in ("cuda", "cpu"):  # the test device has no layer norm of bfloat16
        narrow = train(device, "SGD", "norm", dtype=torch.bfloat16, sharded=True)
        compare_ranks(narrow, "bfloat16")
        wide = train(device, "SGD", "norm", dtype=torch.float32, distributed=False)
        off = max(float((a.float() - b).abs().max()) for a, b in zip(narrow, wide, strict=True))
        assert off < _NARROW_TOLERANCE, f"bfloat16 weights are {off:g} off those of float32"
