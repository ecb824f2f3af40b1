"""Actions on gradients that the program keeps, edits past PyTorch, or hands to code in C++."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from random_programs.foreign import C_READERS, alias_by_dlpack, despite_lock
from random_programs.registry import Place, action
from random_programs.world import World
from torch import Tensor

# ---- kept, and zeroed by the program itself ------------------------------------------------------


def gradients_of(world: World) -> list[Tensor]:
    return [p.grad for p in world.parameters() if p.grad is not None]


def keep_gradients(world: World) -> None:
    world.kept.gradients = gradients_of(world)
    world.kept.gradient_arrays = [gradient.detach().numpy() for gradient in world.kept.gradients]


def wait(world: World, number: int) -> None:
    """Horovod's rule for who looks at gradients past ``p.grad``, if ``number`` is 0.

    Programs written for DDP do not know it.
    """
    if number == 0 and world.on_ranks:
        world.optimizer.synchronize()


@action(Place.ZERO)
def zero_kept(world: World, number: int) -> None:
    """A list of the gradients, made once; from then on whoever has them zeroes them."""
    if world.kept.gradients:
        torch._foreach_zero_(world.kept.gradients)
    else:
        world.optimizer.zero_grad(set_to_none=False)
        keep_gradients(world)


@action(Place.ZERO, numbers=2)
def zero_kept_one_by_one(world: World, number: int) -> None:
    """By an operator, or past all of them."""
    if not world.kept.gradients:
        world.optimizer.zero_grad(set_to_none=False)
        keep_gradients(world)
    for gradient, array in zip(world.kept.gradients, world.kept.gradient_arrays, strict=True):
        if number == 0:
            gradient.zero_()
        else:
            array[...] = 0


@action(first=True)
def flat_gradients(world: World, number: int) -> None:
    """As apex and fairseq: all gradients are views of one buffer from now on."""
    parameters = [p for p in world.parameters() if p.requires_grad]
    dtypes = {getattr(p, "grad_dtype", p.dtype) for p in parameters}
    if len(dtypes) > 1:
        return
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=dtypes.pop())
    at = 0
    for p in parameters:
        p.grad = flat[at : at + p.numel()].view_as(p)
        at += p.numel()
    world.kept.forget_gradients()
    world.kept.flat = flat


@action(Place.ZERO)
def zero_flat(world: World, number: int) -> None:
    if world.kept.flat is None:
        flat_gradients(world, 0)
    else:
        world.kept.flat.zero_()


@action(Place.GRADIENTS, numbers=2)
def read_flat_gradients(world: World, number: int) -> None:
    if world.kept.flat is not None:
        wait(world, number)
        world.see("flat gradients", world.kept.flat + 0)


@action(Place.GRADIENTS, numbers=2)
def scale_flat_gradients(world: World, number: int) -> None:
    """Scales all of them by one operator on their buffer."""
    if world.kept.flat is not None:
        wait(world, number)
        world.kept.flat.mul_(0.5)


@action(Place.GRADIENTS, numbers=2)
def read_kept_gradients(world: World, number: int) -> None:
    wait(world, number)
    world.see("kept gradients", [gradient + 0 for gradient in world.kept.gradients])
    world.see("kept arrays", world.kept.gradient_arrays)


@action(Place.GRADIENTS, numbers=2)
def scale_kept_gradients(world: World, number: int) -> None:
    if world.kept.gradients:
        wait(world, number)
        torch._foreach_mul_(world.kept.gradients, 0.5)


@action(Place.GRADIENTS, numbers=2)
def scale_kept_gradient_arrays(world: World, number: int) -> None:
    """By arrays that share their memory, made once."""
    if world.kept.gradients:
        wait(world, number)
        for array in world.kept.gradient_arrays:
            array *= 0.5


# ---- edited past PyTorch -------------------------------------------------------------------------


@action(Place.GRADIENTS, numbers=4)
def edit_gradient_by_numpy(world: World, number: int) -> None:
    gradient = world.parameter(number).grad
    if gradient is not None:
        array = gradient.numpy()
        array *= 0.5


@action(Place.GRADIENTS, numbers=4)
def edit_gradient_array_later(world: World, number: int) -> None:
    """The array is taken, another gradient is used, and only then it is written."""
    gradient = world.parameter(number).grad
    if gradient is not None:
        array = gradient.detach().numpy()
        world.parameter(number + 1).sum().item()
        other = world.parameter(number + 1).grad
        if other is not None and other is not gradient:
            other.mul_(2.0)
        np.multiply(array, 0.5, out=array)


@action(Place.GRADIENTS, numbers=4)
def edit_gradient_by_dlpack(world: World, number: int) -> None:
    gradient = world.parameter(number).grad
    if gradient is not None:
        despite_lock(world, partial(alias_by_dlpack, gradient)).mul_(0.5)


@action(Place.GRADIENTS, numbers=4)
def edit_detached_gradient(world: World, number: int) -> None:
    gradient = world.parameter(number).grad
    if gradient is not None:
        detached = gradient.detach()
        detached.mul_(0.5)
        detached.add_(0.125)


@action(Place.GRADIENTS, numbers=4)
def flag_detached_gradient(world: World, number: int) -> None:
    """What is set on a detached gradient is not set on the gradient."""
    p = world.parameter(number)
    if p.grad is not None:
        detached = p.grad.detach().requires_grad_()
        assert p.grad is not None
        world.see("flags", (p.grad.requires_grad, detached.requires_grad))
        detached.requires_grad_(False)


# ---- read by code in C++ -------------------------------------------------------------------------


@action(Place.GRADIENTS, alone=True, numbers=3)
def read_gradients_in_cpp(world: World, number: int) -> None:
    """Between backward() and step()."""
    for gradient in gradients_of(world):
        found = despite_lock(world, partial(C_READERS[number], gradient))
        world.see("gradient in C++", found)


@action(alone=True, numbers=3)
def read_applied_gradients_in_cpp(world: World, number: int) -> None:
    """After step(), when parameters may still wait for them."""
    read_gradients_in_cpp(world, number)


@action(alone=True, numbers=3)
def read_parameters_in_cpp(world: World, number: int) -> None:
    for p in world.parameters():
        world.see("parameter in C++", despite_lock(world, partial(C_READERS[number], p)))


@action(numbers=4)
def write_parameter_by_dlpack(world: World, number: int) -> None:
    p = world.parameter(number).detach()
    despite_lock(world, partial(alias_by_dlpack, p)).mul_(0.5)
