"""Mistakes around DistributedOptimizer: who says what, on which rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
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
    with pytest.raises(ModelMismatch) as caught:
        hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
    return str(caught.value)


@pytest.mark.parametrize("kind", ODD_MODELS)
def test_every_rank_learns_that_models_differ(ranks: RankFactory, kind: str) -> None:
    messages = ranks(3).run(body_odd_rank, kind)
    assert len(set(messages)) == 1
    assert f"'{NAMED[kind]}'" in messages[0]
    assert "rank 2" in messages[0]


def body_mistake(name: str) -> str:
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
    return str(caught.value)


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
def test_a_mistake_says_what_is_wrong(ranks: RankFactory, name: str, words: str) -> None:
    for message in ranks(2).run(body_mistake, name):
        assert words in message


def body_without_names() -> tuple[list[float], list[float]]:
    model = nn.Linear(2, 2)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    optimizer = hvd.DistributedOptimizer(sgd(model))
    for _ in range(3):
        model(torch.full((1, 2), float(hvd.rank()))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.weight.flatten().tolist(), model.bias.tolist()


def test_names_are_not_needed(ranks: RankFactory) -> None:
    # Three steps of the rate times the mean of the ranks' gradients: 0.5 for weights, 1 for biases.
    for weights, biases in ranks(2).run(body_without_names):
        assert weights == pytest.approx([-0.15] * 4)
        assert biases == pytest.approx([-0.3] * 2)


def test_use_before_init() -> None:
    with pytest.raises(ValueError, match=r"use hvd\.init\(\)"):
        hvd.DistributedOptimizer(sgd(nn.Linear(2, 2)))
