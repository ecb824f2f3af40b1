"""Actions that hand raw parameters to functorch, or give gradients another type or a graph."""

from __future__ import annotations

from typing import Any

import torch
from random_programs.registry import Place, action
from random_programs.training import gradient_penalty
from random_programs.world import World, loss_of
from torch import Tensor
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap

_PLAIN = ("perceptron", "flat", "blocks", "normed", "tied", "functional")


def can_be_transformed(world: World) -> bool:
    return world.setup.model in _PLAIN and not world.has_backward_hooks


def halves(p: Tensor) -> Tensor:
    """A tangent; made of shape and type, so that nothing reads the parameter for it."""
    return torch.full(p.shape, 0.5, dtype=p.dtype)


# ---- functorch on raw parameters ----------------------------------------------------------------


@action(alone=True, numbers=4)
def transform_parameters(world: World, number: int) -> None:
    """Derivatives of the model in its parameters, which are handed over as they are."""
    if not can_be_transformed(world):
        return
    values = dict(world.model.named_parameters())
    x = world.common_rows().to(world.parameter(0).dtype)

    def loss(parameters: dict[str, Any]) -> Tensor:
        result: Tensor = functional_call(world.model, parameters, (x,))
        return result.square().mean()

    found: Any
    if number == 0:
        found = grad(loss)(values)
    elif number == 1:
        found = jvp(loss, (values,), ({name: halves(p) for name, p in values.items()},))
    elif number == 2:
        value, pull = vjp(loss, values)
        found = value, pull(torch.ones_like(value))
    else:
        found = torch.func.grad_and_value(loss)(values)
    world.see("derivatives", found)


@action(alone=True, numbers=5)
def transform_parameter(world: World, number: int) -> None:
    """Raw parameters as arguments of one transform; nothing else looks at them before."""
    for p in world.parameters():
        x = torch.linspace(-1, 1, p.shape[-1] if p.dim() else 1, dtype=p.dtype)
        found: Any
        if number == 0:
            found = grad(lambda w, x=x: (w * x).square().sum())(p)
        elif number == 1:
            found = jvp(lambda w, x=x: (w * x).sum(), (p,), (halves(p),))
        elif number == 2:
            found = jacrev(lambda w: w.sum(0) * 2)(p)
        elif number == 3:
            found = vmap(lambda row: (row * row).sum())(p)
        else:
            found = vmap(lambda factor, p=p: (p * factor).sum())(x)
        world.see("transformed", found)


@action(alone=True)
def gradients_of_each_row(world: World, number: int) -> None:
    """As in differential privacy: a gradient for each row, of raw parameters."""
    if not can_be_transformed(world):
        return
    values = dict(world.model.named_parameters())
    x = world.common_rows().to(world.parameter(0).dtype)

    def loss(parameters: dict[str, Any], row: Tensor) -> Tensor:
        result: Tensor = functional_call(world.model, parameters, (row[None],))
        return result.square().mean()

    world.see("for each row", vmap(grad(loss), in_dims=(None, 0))(values, x))


@action(alone=True, numbers=4)
def dual_parameter(world: World, number: int) -> None:
    p = world.parameter(number)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(p, halves(p))
        value = (dual * dual).sum()
        world.see("dual", torch.autograd.forward_ad.unpack_dual(value).tangent)


@action(Place.GRADIENTS, alone=True, numbers=4)
def transform_gradient(world: World, number: int) -> None:
    gradient = world.parameter(number).grad
    if gradient is not None:
        world.see("grad", grad(lambda g: g.square().sum())(gradient))
        world.see("vmap", vmap(lambda row: row.sum())(gradient))


# ---- modes around the clearing of gradients ------------------------------------------------------


@action(Place.ZERO, numbers=3)
def zero_in_mode(world: World, number: int) -> None:
    """In place, in inference mode or without gradients."""
    if number == 0:
        with torch.inference_mode():
            world.optimizer.zero_grad(set_to_none=False)
    elif number == 1:
        with torch.inference_mode():
            world.model.zero_grad(set_to_none=False)
    else:
        with torch.no_grad():
            world.optimizer.zero_grad(set_to_none=False)


@action(Place.GRADIENTS, alone=True, numbers=4)
def read_gradient_in_inference_mode(world: World, number: int) -> None:
    gradient = world.parameter(number).grad
    if gradient is not None:
        with torch.inference_mode():
            world.see("gradient", gradient + 0)


# ---- another type, or a graph -------------------------------------------------------------------


@action(first=True, numbers=4, renews=True)
def single_gradients(world: World, number: int) -> None:
    """Gradients of one parameter or of all are in float32 from now on (`Tensor.grad_dtype`)."""
    has_types = hasattr(torch.Tensor, "grad_dtype")  # PyTorch 2.10
    if not has_types or world.setup.optimizer not in ("sgd", "attributed"):
        return
    chosen = world.parameters() if number == 3 else [world.parameter(number)]
    if all(p.dtype == torch.float64 and p.is_leaf for p in chosen):
        for p in chosen:
            p.grad = None
            p.grad_dtype = torch.float32  # type: ignore[attr-defined]


@action(Place.BACKWARD, renews=True)
def penalty_on_gradients(world: World, number: int) -> None:
    """``p.grad`` with a graph, in a loss; ranks refuse that, and do what the error names."""
    if world.setup.passes > 1 or world.setup.model in (
        "recurrent", "attention", "scripted", "custom_function",
    ):  # fmt: skip
        gradient_penalty(world, number)
        return
    parameters = [p for p in world.parameters() if p.requires_grad]

    def by_attribute(half: int) -> Tensor:
        loss = loss_of(world.model, world.rows(half))
        loss.backward(create_graph=True)
        found = [p.grad for p in parameters]
        squares = [g.square().sum() for g in found if g is not None]
        for p in parameters:
            p.grad = None
        return loss + 0.5 * torch.stack(squares).sum()

    def by_function(half: int) -> Tensor:
        loss = loss_of(world.model, world.rows(half))
        found = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
        squares = [g.square().sum() for g in found if g is not None]
        return loss + 0.5 * torch.stack(squares).sum()

    def run(half: int) -> None:
        total = by_function(half) if world.on_ranks else by_attribute(half)
        world.see("with penalty", total)
        total.backward()

    for p in parameters:
        p.grad = None
    world.in_halves(run)
