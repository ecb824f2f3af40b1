"""Training loops off the beaten path, each against one process that does the same.

Every test here tells of a loop that was wrong, slow or hung once.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.on_ranks import on_ranks
from helpers.ranks import RankFactory
from torch import Tensor, nn

import hvd_order.torch as hvd
from hvd_order.base.errors import InvalidUsage

STEPS = 20
ROWS = 12
WIDTH = 4

# Runs all steps and returns the model; `wrap` makes an optimizer distributed, or not, and `mine`
# are this process's rows.
Loop = Callable[[Callable[..., Any], slice], nn.Module]


def rows(step: int, part: int = 0) -> Tensor:
    numbers = torch.Generator().manual_seed(100 * step + part)
    return torch.randn(ROWS, WIDTH, generator=numbers, dtype=torch.float64)


def layers(*widths: int) -> nn.Sequential:
    torch.manual_seed(len(widths))
    modules: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        modules += [nn.Linear(before, after, dtype=torch.float64), nn.Tanh()]
    return nn.Sequential(*modules[:-1])


def wrap_distributed(optimizer: torch.optim.Optimizer, model: nn.Module, **how: Any) -> Any:
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **how)


def wrap_nothing(optimizer: torch.optim.Optimizer, model: nn.Module, **how: Any) -> Any:
    return optimizer


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def check_all_deferred(optimizer: Any) -> None:
    report = optimizer.overlap_report()
    assert report.deferred_parameters == report.parameters > 0, str(report)


# ---- loops ------------------------------------------------------------------------------------


def gan_zeroed_by_optimizers(wrap: Callable[..., Any], mine: slice) -> nn.Module:
    """The generator's loss gives the critic gradients that nobody applies."""
    generator, critic = layers(WIDTH, 8, WIDTH), layers(WIDTH, 8, 6, 1)
    for_generator, for_critic = wrap(sgd(generator), generator), wrap(sgd(critic), critic)
    for step in range(STEPS):
        real, noise = rows(step)[mine], rows(step, 1)[mine]
        for_critic.zero_grad()
        made = generator(noise)
        (critic(made.detach()) - critic(real)).tanh().mean().backward()
        for_critic.step()
        if wrap is wrap_distributed and step >= 2:
            check_all_deferred(for_critic)
        for_generator.zero_grad()
        (-critic(made)).mean().backward()
        for_generator.step()
        if wrap is wrap_distributed and step >= 2:
            check_all_deferred(for_generator)
    return nn.ModuleList([generator, critic])


def gan_with_two_backwards(wrap: Callable[..., Any], mine: slice) -> nn.Module:
    """Real and made rows separately; the generator's loss is one pass of two for the critic."""
    generator, critic = layers(WIDTH, 8, WIDTH), layers(WIDTH, 8, 6, 1)
    for_generator = wrap(sgd(generator), generator)
    for_critic = wrap(sgd(critic), critic, backward_passes_per_step=2)
    for step in range(STEPS):
        for_critic.zero_grad()
        made = generator(rows(step, 1)[mine])
        critic(made.detach()).tanh().mean().backward()
        (-critic(rows(step)[mine])).tanh().mean().backward()
        for_critic.step()
        for_generator.zero_grad()
        (-critic(made)).mean().backward()
        for_generator.step()
    return nn.ModuleList([generator, critic])


def compiled_later(wrap: Callable[..., Any], mine: slice) -> nn.Module:
    """Compiled when updates are deferred already, as a function that is no module."""
    torch._dynamo.reset()
    model = layers(WIDTH, 6, 2)
    optimizer = wrap(sgd(model), model)

    def loss(x: Tensor) -> Tensor:
        return model(x).square().mean()

    for step in range(STEPS):
        if step == 5:
            loss = torch.compile(loss, backend="aot_eager")
        optimizer.zero_grad()
        loss(rows(step)[mine]).backward()
        optimizer.step()
    return model


LOOPS: dict[str, Loop] = {
    loop.__name__: loop
    for loop in (gan_zeroed_by_optimizers, gan_with_two_backwards, compiled_later)
}


def body_loop(name: str) -> list[bytes]:
    ours = LOOPS[name](wrap_distributed, slice(hvd.rank(), None, hvd.size()))
    # A dropped optimizer takes its hooks on all modules with it, and torch.compile fails if that
    # happens between its trace and its guards.
    gc.collect()
    alone = LOOPS[name](wrap_nothing, slice(None))
    for a, b in zip(ours.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-6, atol=1e-12)
    return [p.detach().numpy().tobytes() for p in ours.parameters()]


@pytest.mark.parametrize("name", LOOPS)
def test_equals_one_process(ranks: RankFactory, name: str) -> None:
    first, second = ranks(2).run(body_loop, name)
    assert first == second


# ---- a gradient that only other ranks have ----------------------------------------------------


@pytest.mark.parametrize("clear", ["never", "optimizer", "optimizer in place", "module"])
@on_ranks(2)
def test_a_gradient_that_only_another_rank_had(clear: str) -> None:
    """Rank 0 alone uses `branch` in the fourth step; then the others look at its gradient."""
    torch.manual_seed(1)
    trunk, branch = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    model = nn.Sequential(trunk, branch).double()
    optimizer = wrap_distributed(torch.optim.SGD(model.parameters(), lr=0.1), model)
    x = torch.ones(1, 2, dtype=torch.float64)
    for step in range(4):
        optimizer.zero_grad()
        hidden = trunk(x)
        (branch(hidden) if step < 3 or hvd.rank() == 0 else hidden).sum().backward()
        hidden = hidden.detach()
        optimizer.step()
    check_all_deferred(optimizer)
    if clear == "optimizer":
        optimizer.zero_grad()
    elif clear == "optimizer in place":
        optimizer.zero_grad(set_to_none=False)
    elif clear == "module":
        model.zero_grad()
    _ = branch.weight + 0  # the update of the step, whatever became of its gradient
    gradient = branch.weight.grad
    wanted = {
        "never": (hidden / hvd.size()).expand(2, 2),
        "optimizer in place": torch.zeros(2, 2, dtype=torch.float64),
    }.get(clear)
    if wanted is None:
        assert gradient is None
    else:
        torch.testing.assert_close(gradient.clone(), wanted)


@on_ranks(2)
def test_absent_gradients_of_several_dtypes() -> None:
    """Rank 0 alone uses some layers in the fourth step; neighbours among them differ in dtype."""
    dtypes = [torch.float64, torch.float32, torch.float64, torch.float32, torch.float64]
    layers = nn.ModuleList(nn.Linear(2, 2, bias=False, dtype=dtype) for dtype in dtypes)
    optimizer = wrap_distributed(torch.optim.SGD(layers.parameters(), lr=0.1), layers)
    used = {0, 3, 4}  # by rank 0
    for step in range(4):
        optimizer.zero_grad()
        here = range(5) if step < 3 else used if hvd.rank() == 0 else {4}
        for i in here:
            layers[i](torch.ones(1, 2, dtype=dtypes[i])).sum().backward()
        optimizer.step()
    _ = [layer.weight + 0 for layer in layers]  # updates are made
    found = {i for i, layer in enumerate(layers) if layer.weight.grad is not None}
    assert found == used


# ---- mistakes that hung or were silent --------------------------------------------------------


@on_ranks(2)
def test_reading_a_gradient_inside_the_backward_pass_does_not_hang() -> None:
    model = layers(WIDTH, 6, 2)
    optimizer = wrap_distributed(sgd(model), model)
    last = list(model.parameters())[-1]
    hook = last.register_post_accumulate_grad_hook(lambda p: p.grad.norm())
    with pytest.raises(InvalidUsage) as caught:
        model(rows(0)).sum().backward()
    hook.remove()
    optimizer.synchronize()
    optimizer.zero_grad()
    message = str(caught.value)
    assert "'2.bias'" in message
    assert "register_hook" in message
