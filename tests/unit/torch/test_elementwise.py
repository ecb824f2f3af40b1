"""Which optimizers can update shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.training.optimizers import Normed
from torch import nn

from hvd_order.base.errors import InvalidUsage
from hvd_order.torch.shards import elementwise
from hvd_order.torch.updates.partial_step import inner_step
from hvd_order.torch.updates.separability import separability


def require(optimizer: torch.optim.Optimizer) -> None:
    kind = type(optimizer)
    elementwise.require(optimizer, kind, inner_step(kind), separability(optimizer, kind, None))


@pytest.mark.parametrize("normed", [0, 1, 2])
def test_every_group_is_tried(normed: int) -> None:
    groups: list[dict[str, Any]] = [
        {"params": [nn.Parameter(torch.ones(2, 3))], "normed": number == normed}
        for number in range(3)
    ]
    with pytest.raises(InvalidUsage, match="does not update each element by itself"):
        require(Normed(groups, lr=0.1))
    for group in groups:
        group["normed"] = False
    require(Normed(groups, lr=0.1))


def test_state_made_at_construction() -> None:
    """Of 16-bit parameters: shards of it are float32."""
    parameters = [
        nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16)),
        nn.Parameter(torch.ones(())),
    ]
    require(torch.optim.Adagrad(parameters[:1], lr=0.1, initial_accumulator_value=0.1))
    require(torch.optim.Adagrad(parameters[1:], lr=0.1, initial_accumulator_value=0.1))
