"""Gradients that a program reaches without their parameter: kept, flat, as arrays, from C++.

Each program runs plain and distributed on every rank with the same rows, so averages change
nothing: what it sees must be equal in every bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.jobs import new_job
from helpers.ranks import RankFactory
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


def distributed(optimizer: torch.optim.Optimizer, m: nn.Module) -> Any:
    return hvd.DistributedOptimizer(optimizer, named_parameters=m.named_parameters())


# ---- programs ---------------------------------------------------------------------------------


def list_made_once(wrap: Wrap) -> Seen:
    """As in NVIDIA's and fairseq's loops: the list is made after the first step, and zeroed."""
    m = model()
    optimizer = wrap(sgd(m), m)
    kept: list[Tensor] = []
    for step in range(STEPS):
        if kept:
            torch._foreach_zero_(kept)
        backward(m, step)
        optimizer.step()
        kept = kept or [p.grad for p in m.parameters()]
    return [*kept, *m.parameters()]


def list_made_late(wrap: Wrap) -> Seen:
    """The list is made while gradients lie in our buffers, and zeroed behind the parameters."""
    m = model()
    optimizer = wrap(sgd(m), m)
    kept: list[Tensor] = []
    for step in range(STEPS):
        for gradient in kept:
            gradient.zero_()
        if not kept:
            optimizer.zero_grad(set_to_none=False)
        backward(m, step)
        optimizer.step()
        if step == 4:
            kept = [p.grad for p in m.parameters()]
    return [*kept, *m.parameters()]


def flat(wrap: Wrap, first: bool) -> Seen:
    """All gradients are views of one tensor, which the program zeroes, reads and scales."""
    m = model()
    buffer = torch.zeros(sum(p.numel() for p in m.parameters()), dtype=torch.float64)

    def point() -> None:
        for p, part in zip(
            m.parameters(), buffer.split([p.numel() for p in m.parameters()]), strict=True
        ):
            p.grad = part.view_as(p)

    if first:
        point()
    optimizer = wrap(sgd(m), m)
    seen = []
    for step in range(STEPS):
        if step == 3 and not first:
            point()
        buffer.zero_()
        if step < 3 and not first:
            optimizer.zero_grad()
        backward(m, step)
        seen.append(buffer.clone())
        buffer.mul_(0.5)
        optimizer.step()
    return [*seen, *m.parameters()]


def flat_before(wrap: Wrap) -> Seen:
    return flat(wrap, first=True)


def flat_after(wrap: Wrap) -> Seen:
    return flat(wrap, first=False)


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


def earlier_gradients(wrap: Wrap) -> Seen:
    """What was taken of gradients keeps its elements when gradients of other steps come."""
    m = model()
    optimizer = wrap(sgd(m), m)
    taken = []
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(m, step)
        taken += [p.grad for p in m.parameters()]
        taken += [p.grad.view(-1)[:2] for p in m.parameters()]
        optimizer.step()
    return [*taken, *m.parameters()]


def surgery(wrap: Wrap) -> Seen:
    """Two losses a step, whose gradients are compared, as in PCGrad."""
    m = model()
    optimizer = wrap(sgd(m), m)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(m, step)
        first = [p.grad for p in m.parameters()]
        if sum(g.sum() for g in first) != 0:  # reads them
            optimizer.zero_grad()
        backward(m, step + 100)
        for p, g in zip(m.parameters(), first, strict=True):
            p.grad = p.grad - 0.1 * (p.grad * g).sum() * g
        optimizer.step()
    return [*m.parameters()]


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


def views(wrap: Wrap) -> Seen:
    """Views of gradients, taken while these lie in our buffers, zero them from then on."""
    m = model()
    optimizer = wrap(sgd(m), m)
    taken: list[Tensor] = []
    for step in range(STEPS):
        if taken:
            torch._foreach_zero_(taken)
        else:
            optimizer.zero_grad(set_to_none=False)
        backward(m, step)
        optimizer.step()
        if step == 5:
            taken = [p.grad.view(-1) for p in m.parameters()]
    return [*taken, *m.parameters()]


def array_of_a_sum(wrap: Wrap) -> Seen:
    """As `views`, with arrays, whose writes torch does not see."""
    m = model()
    optimizer = wrap(sgd(m), m)
    arrays: list[Any] = []
    for step in range(STEPS):
        if not arrays:
            optimizer.zero_grad(set_to_none=False)
        for array in arrays:
            array[...] = 0
        backward(m, step)
        optimizer.step()
        if step == 5:
            arrays = [p.grad.numpy() for p in m.parameters()]
    return [*map(torch.from_numpy, arrays), *m.parameters()]


def transformed(wrap: Wrap) -> Seen:
    """Function transforms and `as_subclass` of gradients: torch asks no class before them."""
    m = model()
    optimizer = wrap(sgd(m), m)
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(m, step)
        seen.append(torch.func.vmap(torch.sum)(m[0].weight.grad))
        optimizer.step()
        seen.append(torch.func.grad(lambda g: g.square().sum())(m[2].weight.grad))
        seen.append(m[2].bias.grad.as_subclass(Tensor).clone())
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


PROGRAMS = [
    list_made_once, list_made_late, flat_before, flat_after, one_flat_parameter, array_of_numpy,
    earlier_gradients, surgery, last_of_a_loop, views, array_of_a_sum,
    transformed, static_outputs,
]  # fmt: skip


def body_equal() -> None:
    for program in PROGRAMS:
        alone = [t.detach().clone() for t in program(plain)]
        with new_job(DEFERS):
            together = program(distributed)
        assert len(alone) == len(together)
        for i, (a, b) in enumerate(zip(alone, together, strict=True)):
            assert torch.equal(a, b), f"{program.__name__}: {i} of {len(alone)}"


def test_equal_to_the_plain_program(ranks: RankFactory) -> None:
    ranks(2).run(body_equal)


# ---- readers in C++ ---------------------------------------------------------------------------


def body_reader_in_cpp() -> tuple[str, str]:
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
    return str(before.value), str(again.value)


def test_a_reader_in_cpp_gets_no_unfinished_sum(ranks: RankFactory) -> None:
    for before, again in ranks(2).run(body_reader_in_cpp):
        assert "gradient of '0.weight'" in before
        assert "optimizer.synchronize()" in before
        assert "more than backward_passes_per_step times" in again


# ---- graphs -----------------------------------------------------------------------------------


def body_graph() -> str:
    m = model()
    optimizer = distributed(sgd(m), m)
    loss = m(torch.ones(2, 6, dtype=torch.float64)).square().mean()
    with pytest.raises(InvalidUsage) as raised:
        loss.backward(create_graph=True)
    del optimizer
    return str(raised.value)


def test_a_gradient_with_a_graph_is_refused(ranks: RankFactory) -> None:
    for text in ranks(2).run(body_graph):
        assert "torch.autograd.grad(loss, parameters, create_graph=True)" in text
