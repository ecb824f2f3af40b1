"""Trials choose a planned order; what it does not cover must neither hang nor change a result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.jobs import new_job
from helpers.ranks import RankPool
from torch import nn

import hvd_order.torch as hvd
from hvd_order.base.link.slice_settings import SliceSettings
from hvd_order.engine.engine_host import engine_host
from hvd_order.torch.gradients import tuning

KIB = 1024
PLANNED = SliceSettings(64 * KIB, 128 * KIB, agreement="planned")
BUCKETS = SliceSettings(512 * KIB, 4096 * KIB, "arrival", "planned", cross_iteration=False)
STEPS = 40


class Branches(nn.Module):
    """Layers that a step passes in the one or the other order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(128, 128).double() for _ in range(6))

    def forward(self, x: torch.Tensor, backwards: bool) -> torch.Tensor:
        for layer in reversed(self.layers) if backwards else self.layers:
            x = layer(x).tanh()
        return x


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, 128, generator=generator, dtype=torch.double)


def distributed(model: nn.Module) -> Any:
    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
        named_parameters=model.named_parameters(),
    )


def weights_of(*models: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for model in models for p in model.parameters()]


def body_changing_order(only: SliceSettings) -> tuple[set[str], list[torch.Tensor]]:
    """The order is another one in every third step, on rank 1 in other steps than on rank 0."""
    with pytest.MonkeyPatch.context() as patch, new_job({}):
        patch.setattr(tuning, "candidates", lambda *_, **__: [only])
        model = Branches()
        optimizer = distributed(model)
        seen = set()
        for step in range(STEPS):
            optimizer.zero_grad()
            model(batch(step, hvd.rank()), step % 3 == hvd.rank()).square().mean().backward()
            optimizer.step()
            seen.add(engine_host().agreement)
        return seen, weights_of(model)


@pytest.mark.parametrize("only", [PLANNED, BUCKETS], ids=["overlapping", "buckets"])
def test_an_order_that_changes_with_step_and_rank_changes_no_result(
    three_ranks: RankPool, only: SliceSettings
) -> None:
    size = 3
    results = three_ranks.run(body_changing_order, only)
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = [model(batch(step, r), step % 3 == r).square().mean() for r in range(size)]
        torch.stack(losses).mean().backward()
        optimizer.step()
    for seen, weights in results:
        assert "planned" in seen
        torch.testing.assert_close(weights, weights_of(model), rtol=1e-9, atol=1e-12)


def body_second_optimizer(
    only: SliceSettings, in_the_middle: bool
) -> tuple[list[str], list[torch.Tensor]]:
    with pytest.MonkeyPatch.context() as patch, new_job({}):
        patch.setattr(tuning, "candidates", lambda *_, **__: [only])
        first, second = Branches(), Branches()
        optimizer = distributed(first)
        for step in range(20):
            optimizer.zero_grad()
            first(batch(step, hvd.rank()), False).square().mean().backward()
            optimizer.step()
        seen = [engine_host().agreement]
        patch.undo()
        optimizer.zero_grad()
        if in_the_middle:  # gradients of the first model travel in the planned order
            first(batch(20, hvd.rank()), False).square().mean().backward()
        other = distributed(second)
        seen.append(engine_host().agreement)
        if not in_the_middle:
            first(batch(20, hvd.rank()), False).square().mean().backward()
        for step in range(21, STEPS):
            other.zero_grad()
            second(batch(step, hvd.rank()), True).square().mean().backward()
            other.step()
            optimizer.step()
            optimizer.zero_grad()
            first(batch(step, hvd.rank()), False).square().mean().backward()
        optimizer.step()
        seen.append(engine_host().agreement)
        return seen, weights_of(first, second)


@pytest.mark.parametrize("in_the_middle", [False, True], ids=["between steps", "within a step"])
@pytest.mark.parametrize("only", [PLANNED, BUCKETS], ids=["overlapping", "buckets"])
def test_a_second_optimizer_ends_the_planned_order(
    two_ranks: RankPool, only: SliceSettings, in_the_middle: bool
) -> None:
    results = two_ranks.run(body_second_optimizer, only, in_the_middle)
    first, second = Branches(), Branches()
    for model, begin, backwards in ((first, 0, False), (second, 21, True)):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        for step in range(begin, STEPS):
            optimizer.zero_grad()
            losses = [model(batch(step, rank), backwards).square().mean() for rank in range(2)]
            torch.stack(losses).mean().backward()
            optimizer.step()
    for seen, weights in results:
        assert seen == ["planned", "leader", "leader"]
        torch.testing.assert_close(weights, weights_of(first, second), rtol=1e-9, atol=1e-12)
