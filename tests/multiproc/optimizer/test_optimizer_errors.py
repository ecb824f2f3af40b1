"""Mistakes around DistributedOptimizer, and an update that raises: who says what, on which rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.jobs import refused
from helpers.on_ranks import on_ranks
from helpers.ranks import RankFactory
from torch import nn

import hvd_order.torch as hvd
from hvd_order.base.errors import ModelMismatch

ODD_MODELS: dict[str, Callable[[], nn.Module]] = {
    "shape": lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 5)),
    "dtype": lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double()),
    "missing": lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False)),
    "extra": lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)),
}
NAMED = {"shape": "1.weight", "dtype": "1.weight", "missing": "1.bias", "extra": "2.weight"}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def body_odd_rank(kind: str) -> str:
    odd = hvd.rank() == hvd.size() - 1
    model = (ODD_MODELS[kind] if odd else lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))()
    return refused(
        lambda: hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters()),
        ModelMismatch,
    )


@pytest.mark.parametrize("kind", ODD_MODELS)
def test_every_rank_learns_that_models_differ(ranks: RankFactory, kind: str) -> None:
    messages = ranks(3).run(body_odd_rank, kind)
    assert len(set(messages)) == 1
    assert f"'{NAMED[kind]}'" in messages[0]
    assert "rank 2" in messages[0]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("duplicate", "unique. Found duplicates: same"),
        ("unnamed", "were not named"),
        ("not tuples", "sequence of tuples"),
        ("model", "wrap the optimizer"),
        ("twice", "distributed already"),
        ("passes", "at least 1"),
        ("op", "hvd.Average, hvd.Sum or hvd.Adasum"),
    ],
)
@on_ranks(2)
def test_a_mistake_says_what_is_wrong(name: str, words: str) -> None:
    model = nn.Linear(2, 2)
    named: list[Any] = list(model.named_parameters())
    mistakes: dict[str, Callable[[], Any]] = {
        "duplicate": lambda: hvd.DistributedOptimizer(
            sgd(model), named_parameters=[("same", p) for p in model.parameters()]
        ),
        "unnamed": lambda: hvd.DistributedOptimizer(sgd(model), named_parameters=named[:1]),
        "not tuples": lambda: hvd.DistributedOptimizer(
            sgd(model), named_parameters=model.parameters()
        ),
        "model": lambda: hvd.DistributedOptimizer(model, named_parameters=named),
        "twice": lambda: hvd.DistributedOptimizer(hvd.DistributedOptimizer(sgd(model))),
        "passes": lambda: hvd.DistributedOptimizer(sgd(model), backward_passes_per_step=0),
        "op": lambda: hvd.DistributedOptimizer(sgd(model), op=hvd.Max),
    }
    with pytest.raises((ValueError, TypeError)) as caught:
        mistakes[name]()
    message = str(caught.value)
    assert words in message


def test_use_before_init() -> None:
    with pytest.raises(ValueError, match=r"use hvd\.init\(\)"):
        hvd.DistributedOptimizer(sgd(nn.Linear(2, 2)))


class Failing(torch.optim.SGD):
    """Raises in the update of some step."""

    hvd_order_separable = True
    fails = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if Failing.fails:
            raise ValueError("the update has failed")
        super().step()


@on_ranks(2)
def test_an_update_that_raises_leaves_an_ordinary_state() -> None:
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
