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


def gan(wrap: Callable[..., Any], mine: slice, clear_modules: bool) -> nn.Module:
    """The generator's loss gives the critic gradients that nobody applies."""
    generator, critic = layers(WIDTH, 8, WIDTH), layers(WIDTH, 8, 6, 1)
    for_generator, for_critic = wrap(sgd(generator), generator), wrap(sgd(critic), critic)
    for step in range(STEPS):
        real, noise = rows(step)[mine], rows(step, 1)[mine]
        _ = critic.zero_grad() if clear_modules else for_critic.zero_grad()
        made = generator(noise)
        (critic(made.detach()) - critic(real)).tanh().mean().backward()
        for_critic.step()
        if wrap is wrap_distributed and step >= 2:
            check_all_deferred(for_critic)
        _ = generator.zero_grad() if clear_modules else for_generator.zero_grad()
        (-critic(made)).mean().backward()
        for_generator.step()
        if wrap is wrap_distributed and step >= 2:
            check_all_deferred(for_generator)
    return nn.ModuleList([generator, critic])


def gan_zeroed_by_optimizers(wrap: Callable[..., Any], mine: slice) -> nn.Module:
    return gan(wrap, mine, clear_modules=False)


def gan_zeroed_by_modules(wrap: Callable[..., Any], mine: slice) -> nn.Module:
    return gan(wrap, mine, clear_modules=True)


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


def unfreezing(wrap: Callable[..., Any], mine: slice) -> nn.Module:
    """Layers that become trainable while training goes on."""
    model = layers(WIDTH, 6, 6, 2)
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    optimizer = wrap(sgd(model), model)
    for step in range(STEPS):
        if step == 5:
            model[2].requires_grad_(True)
        if step == 10:
            model.requires_grad_(True)
        optimizer.zero_grad()
        model(rows(step)[mine]).square().mean().backward()
        optimizer.step()
        if wrap is wrap_distributed and step in (4, 9, 19):
            check_all_deferred(optimizer)
    return model


def scheduler_before_wrapping(wrap: Callable[..., Any], mine: slice) -> nn.Module:
    model = layers(WIDTH, 6, 2)
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.8)
    optimizer = wrap(optimizer, model)
    for step in range(STEPS):
        model(rows(step)[mine]).square().mean().backward()
        optimizer.step()
        scheduler.step()
        model.zero_grad(set_to_none=False)
    return model


def recurrent(wrap: Callable[..., Any], mine: slice) -> nn.Module:
    """An LSTM hands the operator a list of parameters that it made when it was built."""
    torch.manual_seed(0)
    model = nn.LSTM(2, 5, num_layers=2, batch_first=True).double()
    optimizer = wrap(torch.optim.Adam(model.parameters(), lr=0.01), model)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(rows(step)[mine].view(-1, WIDTH // 2, 2))[0].square().mean().backward()
        optimizer.step()
        if wrap is wrap_distributed and step >= 2:
            check_all_deferred(optimizer)
    return model


def gradients_set_by_hand(wrap: Callable[..., Any], mine: slice) -> nn.Module:
    """No backward pass, hence no hook; clipped after the ritual."""
    model = layers(WIDTH, 6, 2)
    optimizer = wrap(sgd(model), model)
    for step in range(STEPS):
        parameters = list(model.parameters())
        loss = model(rows(step)[mine]).square().mean()
        for parameter, gradient in zip(
            parameters, torch.autograd.grad(loss, parameters), strict=True
        ):
            parameter.grad = gradient
        if wrap is wrap_distributed:
            optimizer.synchronize()
        nn.utils.clip_grad_norm_(parameters, 0.1)
        optimizer.step()
    return model


def averaged_weights(wrap: Callable[..., Any], mine: slice) -> nn.Module:
    """An average that reads all weights after every step."""
    model = layers(WIDTH, 6, 2)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    optimizer = wrap(sgd(model), model)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(rows(step)[mine]).square().mean().backward()
        optimizer.step()
        average.update_parameters(model)
    return average.module


def transforms(wrap: Callable[..., Any], mine: slice) -> nn.Module:
    """Parameters that a transformed function captures are first read inside of the transform."""
    model = layers(WIDTH, 6, 2)
    optimizer = wrap(sgd(model), model)
    for step in range(STEPS):
        optimizer.zero_grad()
        x = rows(step)[mine]
        slopes = torch.func.vmap(torch.func.grad(lambda row: model(row).sum()))(x)
        (model(x).square().mean() + slopes.square().mean()).backward()
        optimizer.step()
        if wrap is wrap_distributed and step >= 2:
            check_all_deferred(optimizer)
    return model


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
    for loop in (
        gan_zeroed_by_optimizers, gan_zeroed_by_modules, gan_with_two_backwards, unfreezing,
        scheduler_before_wrapping, recurrent, gradients_set_by_hand, averaged_weights,
        transforms, compiled_later,
    )
}  # fmt: skip


def body_loop(name: str) -> list[bytes]:
    ours = LOOPS[name](wrap_distributed, slice(hvd.rank(), None, hvd.size()))
    # A dropped optimizer takes its hooks on all modules with it, and torch.compile fails if that
    # happens between its trace and its guards.
    gc.collect()
    alone = LOOPS[name](wrap_nothing, slice(None))
    for a, b in zip(ours.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-6, atol=1e-12)
    return [p.detach().numpy().tobytes() for p in ours.parameters()]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", LOOPS)
def test_equals_one_process(ranks: RankFactory, name: str, size: int) -> None:
    weights = ranks(size).run(body_loop, name)
    assert all(other == weights[0] for other in weights[1:])


# ---- a gradient that only other ranks have ----------------------------------------------------


def body_absent_gradient(clear: str) -> None:
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


@pytest.mark.parametrize("clear", ["never", "optimizer", "optimizer in place", "module"])
def test_a_gradient_that_only_another_rank_had(ranks: RankFactory, clear: str) -> None:
    ranks(2).run(body_absent_gradient, clear)


# ---- readers under other modes ----------------------------------------------------------------


def body_modes(mode: str) -> None:
    """`late` is first used in the fifth step, so its state is made by a deferred update."""
    results = []
    for wrap in (wrap_distributed, wrap_nothing):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        early, late = model
        optimizer = wrap(torch.optim.Adam(model.parameters(), lr=0.01), model)
        for step in range(8):
            optimizer.zero_grad()
            hidden = early(torch.ones(1, 4)) + late.weight.sum().detach()
            (late(hidden) if step >= 4 else hidden).square().sum().backward()
            optimizer.step()
            with {
                "inference": torch.inference_mode,
                "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
            }[mode]():
                model(torch.ones(1, 4))
        results.append([p.detach() for p in model.parameters()])
    for ours, alone in zip(*results, strict=True):
        torch.testing.assert_close(ours, alone, rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["inference", "autocast"])
def test_an_update_does_not_run_in_its_readers_mode(ranks: RankFactory, mode: str) -> None:
    ranks(2).run(body_modes, mode)


# ---- mistakes that hung or were silent --------------------------------------------------------


def body_read_in_backward() -> str:
    model = layers(WIDTH, 6, 2)
    optimizer = wrap_distributed(sgd(model), model)
    last = list(model.parameters())[-1]
    hook = last.register_post_accumulate_grad_hook(lambda p: p.grad.norm())
    with pytest.raises(InvalidUsage) as caught:
        model(rows(0)).sum().backward()
    hook.remove()
    optimizer.synchronize()
    optimizer.zero_grad()
    return str(caught.value)


def test_reading_a_gradient_inside_the_backward_pass_does_not_hang(ranks: RankFactory) -> None:
    for message in ranks(2).run(body_read_in_backward):
        assert "'2.bias'" in message
        assert "register_hook" in message


def body_two_optimizers() -> str:
    model = layers(WIDTH, 6, 2)
    first = wrap_distributed(sgd(model), model)
    second = wrap_distributed(sgd(model), model)
    with pytest.raises(InvalidUsage) as caught:
        model(rows(0)).sum().backward()
    del first
    message = str(caught.value)
    del caught
    second.zero_grad()
    return message


def test_a_parameter_of_two_optimizers_is_an_error(ranks: RankFactory) -> None:
    for message in ranks(2).run(body_two_optimizers):
        assert "two distributed optimizers" in message


# ---- slices smaller than a tensor -------------------------------------------------------------


def body_tiny() -> None:
    hvd.shutdown()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HVD_ORDER_SLICE_BYTES", "64")
        hvd.init()
    torch.manual_seed(0)
    model = nn.Linear(30, 30, dtype=torch.float64)
    start = model.weight.detach().clone()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5), named_parameters=model.named_parameters()
    )
    x = torch.arange(30.0, dtype=torch.float64)[None] * (hvd.rank() + 1)
    for _ in range(4):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    wanted = start - 4 * 0.5 * x / (hvd.rank() + 1) * 1.5
    torch.testing.assert_close(model.weight.detach(), wanted)
    hvd.shutdown()


def test_slices_of_64_bytes(ranks: RankFactory) -> None:
    ranks(2).run(body_tiny)


# ---- a parameter and its gradient in one operation --------------------------------------------


def body_both() -> None:
    """The gradient's reader applies the update, so the parameter is an ordinary one by then."""
    model = layers(WIDTH, 6, 2)
    optimizer = wrap_distributed(sgd(model), model)
    for step in range(6):
        optimizer.zero_grad()
        model(rows(step)).square().mean().backward()
        optimizer.step()
        if step >= 3:
            check_all_deferred(optimizer)
        weight = model[0].weight
        product = torch.mul(weight, weight.grad)
        assert torch.equal(product, weight.detach() * weight.grad.clone())


def test_a_parameter_and_its_gradient_in_one_operation(ranks: RankFactory) -> None:
    ranks(2).run(body_both)
