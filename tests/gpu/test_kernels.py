"""The kernels that pack, unpack, encode and add up gradients give the CPU's numbers."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

import pytest
import torch
from gpu.on_device import CUDA, DEVICES, run
from helpers.device.opened import require_kernels
from torch import Tensor

from hvd_order._native import _torch as native

_NARROW = (torch.bfloat16, torch.float16)
_SANITIZER = ("compute-sanitizer", "--error-exitcode", "9", "--tool")


@pytest.mark.parametrize("device", DEVICES)
def test_kernels(device: str) -> None:
    run(equal_the_cpu, device)


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.skipif(
    shutil.which(_SANITIZER[0]) is None, reason="compute-sanitizer is not installed"
)
@pytest.mark.timeout(180)
def test_kernels_under_the_sanitizer(device: str, tool: str) -> None:
    run(equal_the_cpu, device, under=(*_SANITIZER, tool), timeout=150)


def equal_the_cpu(device: torch.device) -> None:
    """The numbers of the CPU, bit for bit: special values, several pieces, odd lengths."""
    require_kernels(device)
    for dtype in _NARROW:
        for scale in (1.0, 0.5, 1 / 3):
            for pieces in (_special(dtype).split(1_000_003), _odd_lengths()):
                _compare(pieces, dtype, scale, device)
        for values in (_special(dtype)[:1_000_003], torch.randn(4097), torch.ones(1)):
            for format_ in native.WireFormat.__members__.values():
                for element in (torch.float32, dtype):
                    _compare_codes(values.to(element), format_, device)


def _special(dtype: torch.dtype) -> Tensor:
    """Every value of 16 bits as float32, the neighbours of each, and ties between two of them."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    bits = every.view(torch.int32)
    half = 2 ** (15 if dtype == torch.bfloat16 else 12)
    return torch.cat([bits + off for off in (0, 1, -1, half, half + 1)]).view(torch.float32)


def _odd_lengths() -> list[Tensor]:
    random = torch.Generator().manual_seed(1)
    lengths = [1, 3, 7, 8, 9, 255, 4095, 4096, 4097, 65_537]
    # Views with an odd start: their addresses are not those of an allocation.
    return [torch.randn(n + 1, generator=random)[1:] for n in lengths for _ in range(20)]


def _compare(pieces: Sequence[Tensor], dtype: torch.dtype, scale: float, on: torch.device) -> None:
    def results(device: torch.device) -> list[Tensor]:
        gradients = [piece.to(device, copy=True) for piece in pieces]
        places = [torch.empty(len(piece), dtype=dtype, device=device) for piece in pieces]
        native.pack(gradients, places, scale)
        back = [torch.empty_like(gradient) for gradient in gradients]
        squares = native.unpack(places, back, scale, squares=True)
        assert all(square is not None for square in squares)
        found = [*places, *back, *(s for s in squares if s is not None)]
        return [each.cpu() for each in found]

    _check_equal(results(torch.device("cpu")), results(on), f"{dtype}, scale {scale:g}")


def _compare_codes(values: Tensor, format_: native.WireFormat, on: torch.device) -> None:
    def results(device: torch.device) -> list[Tensor]:
        own = values.to(device, copy=True)
        residual = torch.full_like(own, 1e-3, dtype=torch.float32)
        message = native.encode(own, format_, residual, writes_back=True)
        sums = own.clone()
        native.decode(torch.stack([message, message]), sums, format_, own=1)
        alone = torch.empty_like(own)
        native.decode(message.view(1, -1), alone, format_)
        return [each.cpu() for each in (own, residual, sums, alone)]

    _check_equal(results(torch.device("cpu")), results(on), f"{values.dtype} as {format_.name}")


def _check_equal(here: Sequence[Tensor], there: Sequence[Tensor], what: str) -> None:
    for number, (a, b) in enumerate(zip(here, there, strict=True)):
        same = (a == b) & (a.signbit() == b.signbit()) | a.isnan() & b.isnan()
        assert same.all(), (
            f"{what}, result {number}: {int((~same).sum())} of {len(a)} elements differ from the "
            "CPU's"
        )
