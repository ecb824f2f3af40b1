"""Streams in DLPack's protocol, with memory of the CPU that says it is CUDA's.

tests/gpu has the same with cupy, and tests/multiproc/device with a device that has streams.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch

from hvd_order.array import dlpack
from hvd_order.array.capsule import exported

CUDA = (2, 0)


class Exporter:
    """An array that remembers which stream it was told."""

    def __init__(self, device: tuple[int, int]) -> None:
        self.device = device
        self.options: list[dict[str, Any]] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **options: Any) -> Any:
        self.options.append(options)
        return np.ones(3).__dlpack__(max_version=options.get("max_version"))


class OldExporter(Exporter):
    def __dlpack__(self, stream: Any = "not named") -> Any:
        self.options.append({"stream": stream})
        return np.ones(3).__dlpack__()


def test_a_look_at_the_layout_makes_no_stream_wait() -> None:
    array = Exporter(CUDA)
    assert exported(array).shared
    assert array.options == [{"max_version": (1, 0), "stream": -1}]
    old = OldExporter(CUDA)
    assert exported(old).shared
    assert old.options == [{"stream": -1}]


def test_devices_without_streams_are_told_none() -> None:
    array = Exporter((1, 0))
    exported(array)
    assert array.options == [{"max_version": (1, 0)}]


class CudaTensor:
    """As much of a tensor as is handed over."""

    device = torch.device("cuda", 0)

    def __init__(self) -> None:
        self.streams: list[Any] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA

    def __dlpack__(self, *, stream: Any = "not named", **options: Any) -> str:
        self.streams.append(stream)
        return "capsule"


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The devices that the host has waited for."""
    found: list[torch.device] = []
    monkeypatch.setattr(dlpack, "_finish", found.append)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    return found


@pytest.mark.parametrize(
    ("told", "stream", "host_waits"),
    [
        ({"stream": 94_000}, 94_000, False),
        ({"stream": 1}, 1, False),
        ({"stream": None}, None, False),  # the legacy default stream
        ({}, None, False),  # the same; PyTorch would not wait if nothing were passed
        ({"stream": -1}, -1, True),  # the library orders nothing
    ],
)
def test_the_library_is_ordered_behind_us(
    waits: list[torch.device], told: dict[str, Any], stream: Any, host_waits: bool
) -> None:
    tensor: Any = CudaTensor()
    array = dlpack.hand_to(lambda handed: handed.__dlpack__(**told), tensor)  # type: ignore[attr-defined]
    assert array == "capsule"
    assert tensor.streams == [stream]
    assert waits == [tensor.device] * host_waits


def test_a_library_that_cannot_take_a_tensor_is_waited_for(waits: list[torch.device]) -> None:
    class Lonely:
        pass

    Lonely.__module__ = "no.such.module"
    tensor: Any = CudaTensor()
    dlpack.order_behind(Lonely(), tensor)
    assert waits == [tensor.device]
    assert tensor.streams == []
