"""Codes of 8 and 16 bits beside torch's operators, bit for bit; the same functions run on CUDA."""

from __future__ import annotations

import pytest
import torch
from helpers.oracles.coded_sums import encoded

from hvd_order._native import _torch as native
from hvd_order.base.errors import InvalidUsage

INT8, BF16, FP16 = native.WireFormat.INT8, native.WireFormat.BFLOAT16, native.WireFormat.FLOAT16
COUNTS = [1, 255, 256, 257, 5000]


def random(count: int, seed: int = 0) -> torch.Tensor:
    """Normal values whose magnitude differs from block to block by a factor of up to 10^24."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randn((count + 255) // 256, generator=generator).mul(12).exp()
    return torch.randn(count, generator=generator) * blocks.repeat_interleave(256)[:count]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.nan_to_num(12345.0), b.nan_to_num(12345.0))


def decoded(message: torch.Tensor, like: torch.Tensor, format_: native.WireFormat) -> torch.Tensor:
    out = torch.full_like(like, 7)
    native.decode(message.view(1, -1), out, format_)
    return out


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("feedback", [False, True])
def test_codes_equal_operators(count: int, feedback: bool) -> None:
    values = random(count)
    residual = random(count, seed=1) / 100 if feedback else None
    want = encoded(values, residual)
    message = native.encode(values, INT8, residual)
    assert same(decoded(message, values, INT8), want.received)
    if residual is not None:
        assert torch.equal(residual, want.residual)


def test_a_message_has_about_a_quarter_of_the_bytes() -> None:
    values = torch.randn(256 * 64)
    assert 4 * values.numel() / native.encode(values, INT8).numel() == pytest.approx(3.94, abs=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_sender_can_take_what_receivers_decode(dtype: torch.dtype) -> None:
    values = torch.randn(1000).to(dtype)
    residual = torch.zeros(1000)
    before = values.clone()
    message = native.encode(values, INT8, residual, writes_back=True)
    assert torch.equal(values, decoded(message, values, INT8))
    assert torch.equal(values, encoded(before).received.to(dtype))


def test_values_that_codes_hold_are_exact() -> None:
    codes = torch.randint(-127, 128, (4096,)).float()
    codes[::256] = 127
    for scale in (2.0**-30, 1.0, 2.0**40):
        assert torch.equal(decoded(native.encode(codes * scale, INT8), codes, INT8), codes * scale)


@pytest.mark.parametrize("special", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_arrives_as_such_and_owes_nothing(special: float) -> None:
    values = torch.randn(600)
    values[300] = special
    residual = torch.zeros(600)
    got = decoded(native.encode(values, INT8, residual), values, INT8)
    want = encoded(values, torch.zeros(600))
    assert same(got, want.received)
    assert same(got[300], values[300])
    assert got.isfinite().sum() == 599  # its neighbours are as exact as ever
    assert torch.equal(residual, want.residual)
    assert residual[300] == 0
    nothing_finite = torch.full((3,), special)
    assert same(decoded(native.encode(nothing_finite, INT8), nothing_finite, INT8), nothing_finite)


def adversaries() -> dict[str, torch.Tensor]:
    outlier = torch.randn(512)
    outlier[::256] = 1e6
    alternating = torch.ones(512)
    alternating[::2] = -1
    return {
        "outlier": outlier,
        "alternating": alternating,
        "denormal": torch.full((512,), 1e-40),
        "zero": torch.zeros(512),
        "largest": torch.full((512,), 3e38) * alternating,
    }


@pytest.mark.parametrize("name", adversaries())
def test_the_mean_of_what_is_sent_converges(name: str) -> None:
    """After any number of steps the receiver lacks half a step of the scale, and no more."""
    values, steps = adversaries()[name], 10_000
    residual = torch.zeros(512)
    sent = torch.zeros(512, dtype=torch.float64)
    for step in range(steps):
        each = -values if name == "alternating" and step % 2 else values
        sent += decoded(native.encode(each, INT8, residual), values, INT8)
    true = values.double() * (0 if name == "alternating" else steps)
    bound = (values.abs().max() / 127 + 2.0**-119).item()  # rounding of the additions included
    assert (sent - true).abs().max() <= bound * (1 + 1e-3 * steps**0.5)
    assert residual.abs().max() <= bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("format_", [INT8, BF16, FP16, native.WireFormat.EXACT], ids=str)
@pytest.mark.parametrize("own", [-1, 0, 2])
def test_messages_are_added_in_their_order(
    dtype: torch.dtype, format_: native.WireFormat, own: int
) -> None:
    parts = [torch.randn(777).to(dtype) * 10.0**i for i in range(4)]
    messages = [native.encode(part, format_) for part in parts]
    received = [decoded(m, p, format_) for m, p in zip(messages, parts, strict=True)]
    if format_ == INT8:  # a sum of 16-bit elements adds up what float32 decodes
        received = [encoded(part).received for part in parts]
    want = torch.zeros(777)
    for place, part in enumerate(received):
        want = want + (parts[place] if place == own else part).float()
    values = torch.full((777,), 7).to(dtype) if own < 0 else parts[own].clone()
    rows = torch.stack([m for place, m in enumerate(messages) if place != own])
    native.decode(rows, values, format_, own)
    assert torch.equal(values, want.to(dtype))


@pytest.mark.parametrize("format_", [BF16, FP16], ids=str)
def test_16_bits_are_those_of_torch(format_: native.WireFormat) -> None:
    dtype = torch.bfloat16 if format_ == BF16 else torch.float16
    values, residual = random(1000) * 1e-6, random(1000, seed=1) * 1e-9
    exact = values + residual
    message = native.encode(values, format_, residual)
    assert torch.equal(decoded(message, values, format_), exact.to(dtype).float())
    assert torch.equal(residual, (exact - exact.to(dtype).float()).nan_to_num(0.0, 0.0, 0.0))


def test_doubles_travel_as_they_are() -> None:
    values = torch.randn(300, dtype=torch.float64)
    message = native.encode(values, native.WireFormat.EXACT)
    assert torch.equal(decoded(message, values, native.WireFormat.EXACT), values)
    with pytest.raises(InvalidUsage, match="more than 32 bits"):
        native.encode(values, INT8)
    with pytest.raises(InvalidUsage, match="messages of other values"):
        native.decode(message.view(1, -1), values[:200], native.WireFormat.EXACT)
