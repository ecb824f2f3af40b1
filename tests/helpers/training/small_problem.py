"""A model and its data, in float64, for comparing ranks with one process that has all rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["BATCH", "Weights", "alone", "batches", "equal", "loss_of", "new_model", "weights_of"]

BATCH = 4  # rows, of all ranks together
Weights = Mapping[str, torch.Tensor]


def new_model() -> nn.Sequential:
    """The same in every process."""
    generator = torch.Generator().manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator).double() - 0.5)
    return model


def batches(steps: int, rank: int = 0, size: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's rows of each step's batch, and what they are to give."""
    generator = torch.Generator().manual_seed(11)
    mine = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
    return [
        (
            torch.rand(BATCH, 6, generator=generator).double()[mine],
            torch.rand(BATCH, 3, generator=generator).double()[mine],
        )
        for _ in range(steps)
    ]


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A mean over the rows, so that the ranks' mean is that of the whole batch."""
    return (output - target).square().mean()


def alone(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    steps: int,
    before_step: Callable[[nn.Module], Any] = lambda model: None,
) -> Weights:
    """What one process gets from the whole batches."""
    model = new_model()
    optimizer = make(list(model.parameters()))
    for rows, target in batches(steps):
        optimizer.zero_grad()
        loss_of(model(rows), target).backward()
        before_step(model)
        optimizer.step()
    return weights_of(model)


def weights_of(model: nn.Module) -> Weights:
    """Copies, by name."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def equal(some: Weights, others: Weights) -> bool:
    """Whether they are but for the order of additions."""
    return some.keys() == others.keys() and all(
        torch.allclose(some[name], others[name], rtol=0, atol=1e-12) for name in some
    )
