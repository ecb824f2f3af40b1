"""Packing gradients and unpacking sums, bit for bit beside torch's operators.

On the CPU they run the element functions that the kernels of CUDA run (csrc/torch/cuda/elements.h).
"""

from __future__ import annotations

import pytest
import torch

from hvd_order._native import _torch as native

NARROW = [torch.bfloat16, torch.float16]
SCALES = [1.0, 0.5, 1 / 3]


def special(dtype: torch.dtype) -> torch.Tensor:
    """Every value of 16 bits, its neighbours in float32, ties between two of them, and random
    bits.
    """
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    bits = every.view(torch.int32)
    generator = torch.Generator().manual_seed(0)
    anything = torch.randint(-(2**31), 2**31 - 1, (10**6,), dtype=torch.int64, generator=generator)
    half = 2 ** (15 if dtype == torch.bfloat16 else 12)
    parts = [bits, bits + 1, bits - 1, bits + half, bits + half + 1, anything.to(torch.int32)]
    return torch.cat(parts).view(torch.float32)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a == b) & (torch.signbit(a) == torch.signbit(b)) | a.isnan() & b.isnan()).all())


def as_float32(scale: float) -> float:
    return torch.tensor(scale).item()


@pytest.mark.parametrize("dtype", [torch.float32, *NARROW], ids=str)
@pytest.mark.parametrize("scale", SCALES)
def test_cast_and_scale_equal_operators(dtype: torch.dtype, scale: float) -> None:
    gradient = special(torch.bfloat16 if dtype == torch.float32 else dtype)
    for source in {torch.float32, dtype}:
        out = torch.empty(len(gradient), dtype=dtype)
        native.pack([gradient.to(source)], [out], scale)
        assert same(out, (gradient.to(source).float() * as_float32(scale)).to(dtype))


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("scale", SCALES)
def test_unpacking_equals_operators(dtype: torch.dtype, scale: float) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    out = torch.empty(len(every))
    native.unpack([every], [out], scale, squares=False)
    assert same(out, every.float() * as_float32(scale))


@pytest.mark.parametrize("count", [1, 7, 8, 4095, 4096, 4097, 3 * 4096 + 2049])
def test_the_sum_of_squares_has_one_order(count: int) -> None:
    sums = torch.randn(count, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    out = torch.empty(count)
    (squares,) = native.unpack([sums], [out], 0.5, squares=True)
    assert squares is not None
    for number, chunk in enumerate(out.double().split(4096)):
        padded = torch.nn.functional.pad(chunk * chunk, (0, 4096 - len(chunk)))
        groups = padded.view(2, 256, 8)  # two rounds of 256 lanes with groups of eight
        lanes = torch.zeros(256, dtype=torch.float64)
        for turn in range(2):
            for place in range(8):
                lanes = lanes + groups[turn, :, place]
        while len(lanes) > 1:
            lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
        assert squares[number] == lanes[0]
    torch.testing.assert_close(squares.sum().sqrt(), out.double().norm())


def test_several_at_once() -> None:
    gradients = [torch.randn(3), torch.randn(5, 2).t(), torch.randn(4, dtype=torch.float64)]
    places = [torch.empty(g.shape, dtype=torch.bfloat16) for g in gradients]
    native.pack(gradients, places, 2.0)
    for gradient, place in zip(gradients, places, strict=True):
        assert torch.equal(place, (gradient * 2).to(torch.bfloat16))
    back = [torch.empty_like(g) for g in gradients]
    squares = native.unpack(places, back, 0.5, squares=True)
    for place, found, square in zip(places, back, squares, strict=True):
        assert torch.equal(found, place.to(found.dtype) * 0.5)
        assert square is None or square.sum() == found.double().square().sum()
