"""Actions that log norms of gradients, clip by hand, scale by factors, or scale losses."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from random_programs.kept_gradients import gradients_of
from random_programs.registry import Place, action
from random_programs.world import World
from torch import Tensor, nn


def shown(norm: Tensor) -> Tensor:
    """A norm without its last bits, in which split all-reduces may differ (docs/limits.md)."""
    return norm.detach().float()


def coarse(norm: Tensor) -> Tensor:
    """A norm to compute with: all programs must have the same bits."""
    return norm.detach().bfloat16().to(norm.dtype)


# ---- norms ------------------------------------------------------------------------------------


@action(Place.GRADIENTS, numbers=3)
def log_norms(world: World, number: int) -> None:
    """Adds up squares in the norms that it was given, and clips after that."""
    total = None
    for gradient in gradients_of(world):
        norm = (torch.norm, torch.linalg.vector_norm, Tensor.norm)[number](gradient)
        if total is None:
            total = norm.pow_(2)
        else:
            total += norm.pow_(2)
    if total is not None:
        world.see("logged norm", shown(total.sqrt_()))
        clip_coarsely(world)


def clip_coarsely(world: World, limit: float = 0.25) -> None:
    norm = nn.utils.get_total_norm(gradients_of(world))
    world.see("norm", shown(norm))
    nn.utils.clip_grads_with_norm_(world.parameters(), limit, coarse(norm))


@action(Place.GRADIENTS, numbers=4)
def spoil_norm(world: World, number: int) -> None:
    """A norm is the program's own: what is done to it does not reach the next."""
    gradient = world.parameter(number).grad
    if gradient is None:
        return
    norms = [
        torch.linalg.vector_norm(gradient),
        torch.linalg.vector_norm(gradient, float("inf")),
        torch._foreach_norm([gradient])[0],
        nn.utils.get_total_norm([gradient]),
    ]
    for norm in norms:
        norm.detach().mul_(0.0)
    world.see("norm again", shown(gradient.norm()))
    clip_coarsely(world)


@action(Place.GRADIENTS)
def clip_twice(world: World, number: int) -> None:
    """Keeps what the first clip has given."""
    first = nn.utils.get_total_norm(gradients_of(world))
    clip_coarsely(world, 0.5)
    world.see("first norm", shown(first))
    first.zero_()
    clip_coarsely(world, 0.25)


@action(Place.GRADIENTS, numbers=3)
def clip_by_hand(world: World, number: int) -> None:
    """From norms, from squares or from elements."""
    gradients = gradients_of(world)
    if not gradients:
        return
    if number == 0:
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    elif number == 1:
        norm = sum((g.pow(2).sum() for g in gradients), torch.zeros((), dtype=torch.double)).sqrt()
    else:
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    world.see("norm by hand", shown(norm))
    scale = (0.25 / (coarse(norm) + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale.to(gradient.dtype))


@action(Place.GRADIENTS, numbers=4)
def clip_after_numpy(world: World, number: int) -> None:
    """Norms are looked at, a gradient is changed past PyTorch, then all are clipped."""
    world.see("norm", shown(nn.utils.get_total_norm(gradients_of(world))))
    gradient = world.parameter(number).grad
    if gradient is not None:
        array = gradient.numpy()
        array *= 0.125
    clip_coarsely(world, 0.0625)


@action(Place.GRADIENTS)
def clip_each(world: World, number: int) -> None:
    """Layer by layer, as LARS-like recipes do."""
    for p in world.parameters():
        if p.grad is not None:
            norm = coarse(p.grad.norm())
            p.grad.div_(norm.clamp(min=0.125))


# ---- factors that change without PyTorch's notice ------------------------------------------------


@action(Place.GRADIENTS, numbers=5)
def scale_by_factor(world: World, number: int) -> None:
    """A 0-d tensor, made once, that is set past the count of versions between its uses."""
    factor = world.kept.saved.setdefault("factor", torch.tensor(0.5, dtype=torch.float64))
    array = world.kept.saved.setdefault("factor array", factor.numpy())
    for i, gradient in enumerate(gradients_of(world)):
        value = 1.0 / (1 + (i + world.step_number) % 4)
        if number == 0:
            factor.data.fill_(value)
        elif number == 1:
            array[...] = value
        elif number == 2:
            factor.detach().copy_(torch.tensor(value))
        elif number == 3:
            torch.from_numpy(array).fill_(value)
        else:
            factor.set_(torch.tensor(value, dtype=torch.float64))
            world.kept.saved.pop("factor array", None)
        if i % 2:
            gradient.mul_(factor)
        else:
            gradient.div_(factor)
    np.copyto(array, 0.25)
    factor.data.fill_(0.125)


@action(Place.GRADIENTS, numbers=2)
def scale_all_by_factor(world: World, number: int) -> None:
    """By one operator, and its factor is something else before step()."""
    gradients = gradients_of(world)
    factor = torch.tensor(0.5, dtype=torch.float64)
    if gradients:
        if number == 0:
            torch._foreach_mul_(gradients, factor)
        else:
            torch._foreach_div_(gradients, factor)
    factor.numpy()[...] = 64.0


@action(Place.GRADIENTS)
def clamp_by_tensor(world: World, number: int) -> None:
    limit = torch.tensor(0.0625, dtype=torch.float64)
    for gradient in gradients_of(world):
        gradient.clamp_(min=-limit, max=limit)
    limit.data.fill_(0.0)


# ---- scaled losses ------------------------------------------------------------------------------


class Wide(nn.Module):
    """Its gradients are finite, and their norms are not in its own type."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


@action(numbers=4)
def train_scaled(world: World, number: int) -> None:
    """Steps of a model of its own in 16 or 32 bits, at the ends of what its type can hold."""
    name = f"scaled {number}"
    dtype = (torch.float16, torch.float32, torch.float32, torch.bfloat16)[number]
    steps = 1
    if name not in world.kept.saved:
        steps = 4  # from the third on updates are deferred
        model = Wide(dtype)
        optimizer = world.distribute(torch.optim.SGD(model.parameters(), lr=2.0**-12), model)
        scale = (1.0, 2.0**125, 2.0**-100, 2.0**100)[number]
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10**6)
        world.kept.saved[name] = model, optimizer, scaler
    came = world.gradients_came
    for _ in range(steps):
        scaled_step(world, *world.kept.saved[name])
    world.gradients_came = came


def scaled_step(world: World, model: Wide, optimizer: Any, scaler: torch.amp.GradScaler) -> None:
    dtype = model.weight.dtype
    # In 16 bits the norm of 64 of them is above 65504.
    slope = (32768.0 if dtype == torch.float16 else 1.5) / world.setup.passes
    x = torch.full((64,), slope / 2 if world.setup.is_sum else slope, dtype=dtype)

    def run(half: int) -> None:
        for _ in range(world.setup.passes):
            scaler.scale(model(x)).backward()

    optimizer.zero_grad()
    world.in_halves(run, optimizer, model)
    if dtype == torch.float16:  # what GradScaler.unscale_ calls, without its rule against 16 bits
        infinite = torch.zeros(1, dtype=torch.float32)
        half = torch.tensor(0.5, dtype=torch.float32)
        torch._amp_foreach_non_finite_check_and_unscale_([model.weight.grad], infinite, half)
        world.see("infinite", infinite)
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
        world.see("scale", scaler.get_scale())
    world.see("scaled weights", model.weight)
