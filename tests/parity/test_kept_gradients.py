"""Gradients that a program reaches without their parameter: in memory of its own, and from C++.

Each program runs plain and distributed on every rank with the same rows, so averages change
nothing: what it sees must be equal in every bit. Most of such uses are in tests/random_programs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.jobs import new_job
from helpers.on_ranks import on_ranks
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

import hvd_order.torch as hvd
from hvd_order.base.errors import InvalidUsage

STEPS = 9
DEFERS = {"HVD_ORDER_TUNE": "0"}  # trials of short steps may find that it does not pay
Seen = list[Tensor]
Wrap = Callable[[torch.optim.Optimizer, nn.Module], Any]


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def sgd(m: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9)


def backward(m: nn.Module, step: int) -> None:
    rows = torch.randn(12, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    m(rows).square().mean().backward()


def plain(optimizer: torch.optim.Optimizer, _: nn.Module) -> Any:
    return optimizer


def distributed(optimizer: torch.optim.Optimizer, m: nn.Module, **options: Any) -> Any:
    return hvd.DistributedOptimizer(optimizer, m.named_parameters(), **options)


# ---- programs ---------------------------------------------------------------------------------


def one_flat_parameter(wrap: Wrap) -> Seen:
    """One tensor, and another object with its memory that autograd does not know as a view."""
    m = nn.Linear(6, 1, bias=False).double()
    nn.init.ones_(m.weight)
    mine = torch.zeros_like(m.weight)
    m.weight.grad = mine.detach()
    optimizer = wrap(sgd(m), m)
    seen = []
    for step in range(STEPS):
        mine.zero_()
        backward(m, step)
        seen.append(mine.clone())
        optimizer.step()
    return [*seen, m.weight]


def array_of_numpy(wrap: Wrap) -> Seen:
    """Gradients in memory of numpy, which zeroes and scales it."""
    m = model()
    arrays = [p.detach().numpy() * 0 for p in m.parameters()]
    for p, array in zip(m.parameters(), arrays, strict=True):
        p.grad = torch.from_numpy(array)
    optimizer = wrap(sgd(m), m)
    for step in range(STEPS):
        for array in arrays:
            array[...] = 0
        backward(m, step)
        for array in arrays:
            array *= 0.5
        optimizer.step()
    return [*map(torch.from_numpy, arrays), *m.parameters()]


def last_of_a_loop(wrap: Wrap) -> Seen:
    """A name that a loop leaves behind keeps one gradient; it is zeroed in place."""
    m = model()
    optimizer = wrap(sgd(m), m)
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        backward(m, step)
        optimizer.step()
        for p in m.parameters():
            gradient = p.grad
        seen.append(gradient.clone())
    return [*seen, *m.parameters()]


class Static(torch.autograd.Function):
    """Leaves its gradient in memory of its own, as a captured graph does."""

    memory = torch.zeros(3, dtype=torch.float64)

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        return x + bias

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], Static.memory.copy_(gradients[0].sum(0)).detach()


def static_outputs(wrap: Wrap) -> Seen:
    """The memory of the first gradient of a pass is not the program's: the sum stays in flight."""
    m = model()
    m.register_parameter("bias", nn.Parameter(torch.zeros(3, dtype=torch.float64)))
    optimizer = wrap(sgd(m), m)
    for step in range(STEPS):
        optimizer.zero_grad()
        x = torch.full((2, 6), 0.1 * step, dtype=torch.float64)
        Static.apply(m(x), m.bias).square().mean().backward()
        optimizer.step()
    if wrap is distributed:
        report = optimizer.overlap_report()
        assert report.deferred_parameters == report.parameters, str(report)
    return [*m.parameters()]


PROGRAMS = [one_flat_parameter, array_of_numpy, last_of_a_loop, static_outputs]


@on_ranks(2)
def test_equal_to_the_plain_program() -> None:
    for program in PROGRAMS:
        alone = [t.detach().clone() for t in program(plain)]
        with new_job(DEFERS):
            together = program(distributed)
        assert len(alone) == len(together)
        for i, (a, b) in enumerate(zip(alone, together, strict=True)):
            assert torch.equal(a, b), f"{program.__name__}: {i} of {len(alone)}"


# ---- readers in C++ ---------------------------------------------------------------------------


@on_ranks(2)
def test_a_reader_in_cpp_gets_no_unfinished_sum() -> None:
    """Python sees neither reader; a complete gradient is no secret."""
    m = model()
    optimizer = distributed(sgd(m), m)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(m, step)
        if step < STEPS - 1:
            optimizer.step()
    with pytest.raises(RuntimeError) as before:
        from_dlpack(torch._C._to_dlpack(m[0].weight.grad))
    optimizer.synchronize()
    complete = from_dlpack(torch._C._to_dlpack(m[0].weight.grad))
    assert torch.equal(complete, m[0].weight.grad)
    optimizer.step()
    optimizer.zero_grad()
    backward(m, 0)
    with pytest.raises(RuntimeError) as again:
        backward(m, 0)
    before = str(before.value)
    again = str(again.value)
    assert "gradient of '0.weight'" in before
    assert "optimizer.synchronize()" in before
    assert "more than backward_passes_per_step times" in again


# ---- graphs -----------------------------------------------------------------------------------


@on_ranks(2)
def test_a_gradient_with_a_graph_is_refused() -> None:
    m = model()
    optimizer = distributed(sgd(m), m)
    loss = m(torch.ones(2, 6, dtype=torch.float64)).square().mean()
    with pytest.raises(InvalidUsage) as raised:
        loss.backward(create_graph=True)
    del optimizer
    text = str(raised.value)
    assert "torch.autograd.grad(loss, parameters, create_graph=True)" in text
