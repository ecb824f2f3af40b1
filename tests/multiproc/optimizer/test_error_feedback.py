"""Compression with error feedback, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.ranks import RankPool

import hvd_order.torch as hvd

STEPS = 60


def body_train(name: str) -> torch.Tensor:
    """Gradients whose last bits 16 bits do not hold, and which hardly change."""
    model = torch.nn.Linear(64, 8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        named_parameters=model.named_parameters(),
        compression=getattr(hvd.Compression, name),
    )
    x = 1.001 + torch.arange(64) / 777 + hvd.rank() / 3
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_weights_follow_those_without_compression(two_ranks: RankPool, name: str) -> None:
    exact = two_ranks.run(body_train, "none")[0]
    plain = two_ranks.run(body_train, name)[0]
    ours = two_ranks.run(body_train, f"{name}_ef")
    assert torch.equal(ours[0], ours[1])
    error, without = (ours[0] - exact).abs().max(), (plain - exact).abs().max()
    # The casts of two ranks lose nothing now; the sum is still rounded once a step.
    assert error < without / 2, (error, without)


def body_after_a_step_left_out(name: str, use: str) -> bool:
    """Whether a step without an update leaves nothing to the next, whose loss has another scale."""

    def wrapped(weight: torch.nn.Parameter) -> Any:
        return hvd.DistributedOptimizer(
            torch.optim.SGD([weight], lr=1.0), compression=getattr(hvd.Compression, name)
        )

    def weights(leaves_out: bool) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.zeros(64))
        optimizer = wrapped(weight)
        gradient = 1.001 + torch.arange(64) / 777 + hvd.rank() / 3
        for step in range(8):
            if step == 4 and not leaves_out:
                del optimizer  # with what the casts have lost
                optimizer = wrapped(weight)
            if step == 4 and leaves_out:
                of_large_scale = 4096 * gradient
                of_large_scale[0] = torch.inf
                weight.backward(of_large_scale)
                if use == "read":
                    assert not weight.grad.isfinite().all()  # type: ignore[union-attr]
                else:
                    torch._foreach_mul_([weight.grad], 1 / 4096)
                optimizer.zero_grad()
            weight.backward(gradient)
            optimizer.step()
            optimizer.zero_grad()
        return weight.detach()

    return torch.equal(weights(leaves_out=True), weights(leaves_out=False))


@pytest.mark.parametrize("name", ["bf16_ef", "fp16_ef"])
def test_a_step_left_out_leaves_nothing_to_the_next(two_ranks: RankPool, name: str) -> None:
    """GradScaler leaves a step out, and takes another scale."""
    for use in ("read", "in flight"):
        assert two_ranks.run(body_after_a_step_left_out, name, use) == [True, True]
