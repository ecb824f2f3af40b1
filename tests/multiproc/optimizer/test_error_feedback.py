"""Compression with error feedback, on real ranks."""

from __future__ import annotations

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
