"""cupy's arrays, whose kernels run on a stream of cupy's own."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from gpu.on_device import CUDA, run
from helpers.device.opened import Busy

import hvd_order.array as arrays
import hvd_order.torch as hvd

_ROUNDS = 20


@pytest.mark.parametrize("device", [CUDA])
def test_sums_of_arrays_on_a_stream_of_cupys_own(device: str) -> None:
    pytest.importorskip("cupy", reason="cupy is not installed")
    run(sums_arrays, device, ranks=2, backend="fastest")


def sums_arrays(device: torch.device) -> None:
    """A sum sees what cupy's stream writes last before the call, and nothing of what follows."""
    cupy: Any = importlib.import_module("cupy")
    size, rank = hvd.size(), hvd.rank()
    expected = size * (size + 1) / 2
    busy = Busy(device)
    own = cupy.cuda.Stream(non_blocking=True)
    with own:
        array = cupy.zeros(2**20, dtype=cupy.float32)
        for number in range(_ROUNDS):
            with torch.cuda.stream(torch.cuda.ExternalStream(own.ptr)):
                busy.enqueue(0.002)  # what follows is late
            array.fill((rank + 1) * (number + 1))
            handle = arrays.allreduce_async(array, op=hvd.Sum)
            array.fill(-1)
            found = arrays.synchronize(handle)
            wrong = int((found != expected * (number + 1)).sum())
            assert wrong == 0, f"round {number}: {wrong} of {array.size} elements are wrong"
