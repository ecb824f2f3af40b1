"""The user's optimizer raises in an update that ``step()`` has deferred."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.ranks import RankPool
from torch import nn

import hvd_order.torch as hvd


class Failing(torch.optim.SGD):
    """Raises in the update of some step."""

    hvd_order_separable = True
    fails = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if Failing.fails:
            raise ValueError("the update has failed")
        super().step()


def body_failing_update() -> None:
    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.fill_(0.5)
    optimizer: Any = hvd.DistributedOptimizer(
        Failing(model.parameters(), lr=0.1, momentum=0.5), model.named_parameters(), separable=True
    )

    def train() -> None:
        model(torch.ones(2, 4)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(5):
        train()
    assert optimizer.overlap_report().deferred_parameters == 2
    optimizer.flush()
    before = model.weight.detach().clone()
    train()
    Failing.fails = True
    try:
        with pytest.raises(ValueError, match="the update has failed") as raised:
            optimizer.flush()
    finally:
        Failing.fails = False
    if hasattr(raised.value, "__notes__"):
        assert "'weight', 'bias'" in raised.value.__notes__[0]
    # As after an error in step(): the old values, and nothing of hvd_order is left on them.
    optimizer.flush()
    assert type(model.weight) is nn.Parameter
    assert type(model.weight.detach()) is torch.Tensor
    torch.testing.assert_close(model.weight.detach(), before, rtol=0, atol=0)
    assert model.weight.grad is None
    assert len(optimizer.state) == 2
    train()
    optimizer.flush()
    assert not torch.equal(model.weight.detach(), before)


def test_an_update_that_raises_leaves_an_ordinary_state(two_ranks: RankPool) -> None:
    two_ranks.run(body_failing_update)
