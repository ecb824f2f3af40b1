"""timm's Lookahead around DistributedOptimizer; inside of it: tests/parity/test_separability.py."""

from __future__ import annotations

import helpers.environments.torchvision_operators  # noqa: F401
import pytest
import torch
from helpers.ranks import RankFactory
from helpers.training.small_problem import (
    Weights,
    alone,
    batches,
    equal,
    loss_of,
    new_model,
    weights_of,
)
from torch import nn

import hvd_order.torch as hvd

timm_optim = pytest.importorskip("timm.optim")

STEPS = 9
K = 3


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def look_ahead(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    wrapped: torch.optim.Optimizer = timm_optim.Lookahead(optimizer, alpha=0.5, k=K)
    return wrapped


def body_lookahead() -> Weights:
    model = new_model()
    optimizer = look_ahead(
        hvd.DistributedOptimizer(sgd(list(model.parameters())), model.named_parameters())
    )
    for rows, target in batches(STEPS, hvd.rank(), hvd.size()):
        optimizer.zero_grad()
        loss_of(model(rows), target).backward()
        optimizer.step()
    return weights_of(model)


@pytest.mark.timeout(300)
def test_lookahead_around_ours_equals_one_process(ranks: RankFactory) -> None:
    expected = alone(lambda parameters: look_ahead(sgd(parameters)), STEPS)
    for weights in ranks(2).run(body_lookahead, timeout=240):
        assert equal(weights, expected)
