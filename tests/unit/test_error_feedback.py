"""The cast with error feedback, bit for bit beside torch's operators."""

from __future__ import annotations

import math

import pytest
import torch

from hvd_order import _torch as native

NARROW = [torch.bfloat16, torch.float16]


def by_operators(
    gradient: torch.Tensor, scale: float, residual: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    exact = gradient * scale + residual
    out = exact.to(dtype)
    return out, (exact - out.float()).nan_to_num(0.0, 0.0, 0.0)


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


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.5, 1 / 3])
def test_equals_operators_over_special_values(dtype: torch.dtype, scale: float) -> None:
    gradient = special(dtype)
    residual = torch.randn(len(gradient), generator=torch.Generator().manual_seed(1))
    residual[::2] = 0
    factor = torch.tensor(scale).item()  # as a float32
    wanted, left = by_operators(gradient, factor, residual, dtype)
    out = torch.empty(len(gradient), dtype=dtype)
    native.cast_with_feedback(gradient, scale, residual, out)
    assert same(out, wanted)
    assert same(residual, left)
    assert residual.isfinite().all()


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_nothing_is_lost_over_many_steps(dtype: torch.dtype) -> None:
    gradient = torch.tensor([1.001, -3e-5, 700.3])
    residual = torch.zeros(3)
    sent = torch.zeros(3, dtype=torch.float64)
    out = torch.empty(3, dtype=dtype)
    for _ in range(1000):
        native.cast_with_feedback(gradient, 1.0, residual, out)
        sent += out.double()
    one_rounding = gradient.abs() * 2 ** (-8 if dtype == torch.bfloat16 else -11)
    assert ((sent - 1000 * gradient.double()).abs() <= 1.1 * one_rounding + 1e-3).all()


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_sent_once(value: float) -> None:
    residual = torch.full((4,), 0.25)
    out = torch.empty(4, dtype=torch.float16)
    native.cast_with_feedback(torch.full((4,), value), 1.0, residual, out)
    assert same(out.float(), torch.full((4,), value))
    native.cast_with_feedback(torch.ones(4), 1.0, residual, out)
    assert out.tolist() == [1.0] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_any_layout(dtype: torch.dtype) -> None:
    gradient = torch.randn(6, 4, dtype=dtype).t()
    residual = torch.zeros(4, 6, dtype=dtype)
    out = torch.empty(4, 6, dtype=torch.bfloat16)
    native.cast_with_feedback(gradient, 1.0, residual, out)
    assert torch.equal(out, gradient.to(torch.bfloat16))
    assert torch.equal(residual, gradient - out.to(dtype))
