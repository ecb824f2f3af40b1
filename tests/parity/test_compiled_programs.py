"""Programs that compile more than the model: ``step()``, a whole step, the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.on_ranks import on_ranks
from helpers.ranks import RankPool
from parity.programs import WIDTH, Block
from torch import Tensor, nn

import hvd_order.torch as hvd
from hvd_order.base.errors import InvalidUsage

STEPS = 5
ROWS = 12

Program = Callable[[nn.Module, Any, Callable[[int], Tensor], bool], None]


def backward(model: nn.Module, x: Tensor) -> None:
    model(x).pow(2).mean().backward()


def compiled(function: Callable[..., Any], wanted: bool) -> Callable[..., Any]:
    return torch.compile(function, backend="eager") if wanted else function


def step_alone(model: nn.Module, optimizer: Any, rows: Callable[[int], Tensor], it: bool) -> None:
    """As in PyTorch's tutorial about compiled optimizers."""
    step = compiled(lambda: optimizer.step(), it)
    for k in range(STEPS):
        optimizer.zero_grad()
        backward(model, rows(k))
        step()


def whole_step(model: nn.Module, optimizer: Any, rows: Callable[[int], Tensor], it: bool) -> None:
    def train(x: Tensor) -> None:
        optimizer.zero_grad()
        backward(model, x)
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()

    train = compiled(train, it)
    for k in range(STEPS):
        train(rows(k))


@pytest.mark.parametrize("program", [pytest.param(step_alone, marks=pytest.mark.long), whole_step])
@on_ranks(2)
def test_compiled_program_equals_one_process(program: Program) -> None:
    """One without a compiler."""

    def train(distributed: bool) -> list[Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        optimizer: Any = torch.optim.Adam(
            model.parameters(), lr=torch.tensor(0.01, dtype=torch.float64)
        )
        if distributed:
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())

        def rows(k: int) -> Tensor:
            numbers = torch.Generator().manual_seed(k)
            x = torch.randn(ROWS, 6, generator=numbers, dtype=torch.float64)
            return x.chunk(hvd.size())[hvd.rank()] if distributed else x

        program(model, optimizer, rows, distributed)
        return [p.detach().clone() for p in model.parameters()]

    try:
        torch.testing.assert_close(train(True), train(False), rtol=1e-12, atol=1e-14)
    finally:
        torch._dynamo.reset()


def body_compiled_autograd() -> str:
    model = nn.Linear(4, 4)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for compiled_autograd in (False, True):
        with torch._dynamo.config.patch(compiled_autograd=compiled_autograd):
            compute = compiled(backward, compiled_autograd)
            try:
                compute(model, torch.ones(2, 4))
                optimizer.step()
                optimizer.zero_grad()
            except InvalidUsage as error:
                return str(error)
            finally:
                torch._dynamo.reset()
    return ""


def test_compiled_autograd_is_refused(two_ranks: RankPool) -> None:
    """It calls nothing at the end of the pass, so gradients would be read before their sums."""
    for error in two_ranks.run(body_compiled_autograd):
        assert "compiled_autograd = False" in error


@on_ranks(2)
def test_a_watch_compiles_nothing_anew() -> None:
    """How often a block is compiled whose program hvd_order watches in many of its steps."""
    made = []

    def backend(graph: Any, _inputs: Any) -> Any:
        made.append(graph)
        return graph

    # Takes one step, and is watched from then on.
    beside = nn.Linear(2, 2)
    waiting = hvd.DistributedOptimizer(torch.optim.SGD(beside.parameters(), lr=0.1))
    backward(beside, torch.ones(1, 2))
    waiting.step()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Block())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model[1].compile(backend=backend, fullgraph=True)
    try:
        for _ in range(10):
            optimizer.zero_grad()
            backward(model, torch.ones(2, WIDTH))
            optimizer.step()
    finally:
        torch._dynamo.reset()
    assert len(made) == 1
