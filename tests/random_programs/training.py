"""Actions that make, change, use and clear gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from random_programs.registry import Place, action
from random_programs.world import World, in_thread, loss_of
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

# ---- cleared ----------------------------------------------------------------------------------


@action(Place.ZERO, renews=True)
def zero(world: World, number: int) -> None:
    world.optimizer.zero_grad()


@action(Place.ZERO)
def zero_in_place(world: World, number: int) -> None:
    world.optimizer.zero_grad(set_to_none=False)


@action(Place.ZERO, renews=True)
def zero_model(world: World, number: int) -> None:
    world.model.zero_grad()


@action(Place.ZERO)
def zero_model_in_place(world: World, number: int) -> None:
    world.model.zero_grad(set_to_none=False)


@action(Place.ZERO, renews=True)
def zero_by_hand(world: World, number: int) -> None:
    for p in world.parameters():
        p.grad = None


@action(Place.ZERO)
def never_zero(world: World, number: int) -> None:
    pass


@action(Place.ZERO, numbers=4, renews=True)
def zero_one(world: World, number: int) -> None:
    world.parameter(number).grad = None


# ---- forward and backward -----------------------------------------------------------------------


@action(Place.BACKWARD)
def backward(world: World, number: int) -> None:
    world.backward()


def with_loss(world: World, loss: Callable[[nn.Module, Tensor], Tensor]) -> None:
    world.loss = loss
    try:
        world.backward()
    finally:
        world.loss = loss_of


def checkpointed(world: World, reentrant: bool) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        if isinstance(model, nn.Sequential) and reentrant:
            return (
                checkpoint_sequential(model, 2, x.requires_grad_(), use_reentrant=True)
                .square()
                .mean()
            )
        return checkpoint(model, x, use_reentrant=False).square().mean()

    with_loss(world, loss)


@action(Place.BACKWARD)
def checkpointed_backward(world: World, number: int) -> None:
    checkpointed(world, reentrant=False)


@action(Place.BACKWARD)
def reentrant_backward(world: World, number: int) -> None:
    checkpointed(world, reentrant=True)


@action(Place.BACKWARD)
def functional_backward(world: World, number: int) -> None:
    with_loss(
        world,
        lambda model, x: functional_call(model, dict(model.named_parameters()), x).square().mean(),
    )


@action(Place.BACKWARD, numbers=3)
def backward_without_a_layer(world: World, number: int) -> None:
    """LayerDrop, the same layer on all ranks."""
    drop_layer(world, number, ranks=(0, 1))


@action(Place.BACKWARD, numbers=3)
def backward_without_a_layer_on_one_rank(world: World, number: int) -> None:
    drop_layer(world, number, ranks=(0, 1) if world.setup.same_rows else (1,))


def drop_layer(world: World, number: int, ranks: tuple[int, ...]) -> None:
    layers = [m for m in world.model.modules() if hasattr(m, "skipped")]

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        if layers:
            layers[number % len(layers)].skipped = world.half in ranks
        try:
            return loss_of(model, x)
        finally:
            for layer in layers:
                layer.skipped = False

    with_loss(world, loss)


@action(Place.BACKWARD)
def backward_on_one_rank(world: World, number: int) -> None:
    """The other rank only looks at its loss; its gradients count as zeros."""
    if world.setup.same_rows:
        world.backward()
        return

    def run(half: int) -> None:
        for part in range(world.setup.passes):
            loss = loss_of(world.model, world.rows(half, part))
            if half == 0:
                loss.backward()

    world.in_halves(run)


@action(Place.BACKWARD)
def no_backward(world: World, number: int) -> None:
    """A step without a backward pass before it."""


@action(Place.BACKWARD)
def forward_twice(world: World, number: int) -> None:
    """The first forward pass is for nothing."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        world.see("first", loss_of(model, x * 2))
        return loss_of(model, x)

    with_loss(world, loss)


@action(Place.BACKWARD)
def shared_forward(world: World, number: int) -> None:
    with_loss(world, lambda model, x: loss_of(model, x) + loss_of(model, x * 0.5))


@action(Place.BACKWARD)
def autocast_backward(world: World, number: int) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).double().square().mean()

    with_loss(world, loss)


@action(Place.BACKWARD)
def backward_with_saved_tensor_hooks(world: World, number: int) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        packed: list[int] = []

        def pack(tensor: Tensor) -> Tensor:
            packed.append(tensor.numel())
            return tensor.clone()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = loss_of(model, x)
        world.see("packed", packed)
        return result

    with_loss(world, loss)


@action(Place.BACKWARD)
def gradient_penalty(world: World, number: int) -> None:
    """Differentiates twice."""
    if world.setup.model in ("recurrent", "attention", "scripted", "custom_function"):
        world.backward()
        return

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        value = loss_of(model, x)
        (slope,) = torch.autograd.grad(value, x, create_graph=True)
        return value + slope.square().sum()

    with_loss(world, loss)


@action(Place.BACKWARD)
def backward_through_a_transform(world: World, number: int) -> None:
    if world.has_backward_hooks or world.setup.model not in (
        "perceptron", "flat", "blocks", "normed", "tied", "functional",
    ):  # fmt: skip
        world.backward()
        return

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        slopes = vmap(grad(lambda row: model(row[None]).sum()))(x)
        return loss_of(model, x) + slopes.square().mean()

    with_loss(world, loss)


@action(Place.BACKWARD)
def backward_in_thread(world: World, number: int) -> None:
    in_thread(world.backward)()


@action(Place.BACKWARD)
def weight_penalty(world: World, number: int) -> None:
    """Reads all parameters after the forward pass."""
    with_loss(
        world,
        lambda model, x: (
            loss_of(model, x)
            + 0.125 * sum((p.square().sum() for p in model.parameters()), torch.zeros(()).double())
        ),
    )


@action(Place.BACKWARD, renews=True)
def gradients_by_hand(world: World, number: int) -> None:
    """No backward pass, hence no hook."""

    def run(half: int) -> None:
        parameters = [p for p in world.parameters() if p.requires_grad]
        loss = loss_of(world.model, world.rows(half))
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        for p, gradient in zip(parameters, found, strict=True):
            p.grad = gradient

    if world.setup.passes == 1:
        world.in_halves(run)
        if world.rank is not None:
            world.optimizer.synchronize()  # until then they are this rank's own
    else:
        world.backward()


@action(Place.BACKWARD)
def backward_with_inputs(world: World, number: int) -> None:
    """Names whose gradients it wants."""

    def run(half: int) -> None:
        for part in range(world.setup.passes):
            loss_of(world.model, world.rows(half, part)).backward(
                inputs=[p for p in world.parameters() if p.requires_grad]
            )

    world.in_halves(run)


# ---- gradients, between backward and step -------------------------------------------------------


@action(Place.GRADIENTS, alone=True, numbers=4)
def read_gradient(world: World, number: int) -> None:
    gradient = world.parameter(number).grad
    world.see("gradient", None if gradient is None else gradient + 0)


@action(Place.GRADIENTS)
def clip_norm(world: World, number: int) -> None:
    """What ``clip_grad_norm_`` does, by a norm without its last bits: those may differ from one
    process's where all-reduces are split, because squares are added up in another order.
    """
    norm = nn.utils.get_total_norm([p.grad for p in world.parameters() if p.grad is not None])
    world.see("norm", norm.float())
    nn.utils.clip_grads_with_norm_(world.parameters(), 0.25, norm.bfloat16().to(norm.dtype))


@action(Place.GRADIENTS)
def clip_infinity_norm(world: World, number: int) -> None:
    """Exact: the largest element is the same in whatever order it is looked for."""
    norm = nn.utils.clip_grad_norm_(world.parameters(), 0.25, norm_type=float("inf"))
    world.see("infinity norm", norm.float())


@action(Place.GRADIENTS)
def clip_value(world: World, number: int) -> None:
    if any(p.grad is not None for p in world.parameters()):
        nn.utils.clip_grad_value_(world.parameters(), 0.0625)


@action(Place.GRADIENTS, numbers=4)
def scale_gradient(world: World, number: int) -> None:
    gradient = world.parameter(number).grad
    if gradient is not None:
        gradient.mul_(0.5)


@action(Place.GRADIENTS, numbers=4, renews=True)
def replace_gradient(world: World, number: int) -> None:
    p = world.parameter(number)
    if p.grad is not None:
        p.grad = p.grad * 0.5


@action(Place.GRADIENTS, numbers=4, renews=True)
def cancel_gradient(world: World, number: int) -> None:
    """As DINO keeps its last layer still in the first epoch."""
    world.parameter(number).grad = None


@action(Place.GRADIENTS)
def noise(world: World, number: int) -> None:
    for p in world.parameters():
        if p.grad is not None:
            p.grad.add_(torch.randn_like(p), alpha=0.125)


@action(Place.GRADIENTS)
def central_gradients(world: World, number: int) -> None:
    for p in world.parameters():
        if p.grad is not None:
            p.grad.data.sub_(p.grad.data.mean())


@action(Place.GRADIENTS)
def synchronize(world: World, number: int) -> None:
    if world.rank is not None:
        world.optimizer.synchronize()


@action(Place.GRADIENTS, numbers=4)
def read_weight(world: World, number: int) -> None:
    world.see("weight", world.parameter(number).detach())


@action(Place.GRADIENTS, numbers=4)
def scale_weight(world: World, number: int) -> None:
    with torch.no_grad():
        world.parameter(number).mul_(0.75)


@action(Place.GRADIENTS, renews=True)
def cast_with_gradients(world: World, number: int) -> None:
    world.cast(torch.float32)


@action(Place.GRADIENTS, numbers=4)
def keep_gradient(world: World, number: int) -> None:
    """Taken before step(), looked at right after it.

    Who keeps it longer sees later gradients: it is a view of the buffer
    (docs/guides/training.md, "Memory").
    """
    gradient = world.parameter(number).grad
    if gradient is not None:
        world.kept.saved["gradient"] = gradient


# ---- updated ------------------------------------------------------------------------------------


@action(Place.UPDATE)
def step(world: World, number: int) -> None:
    world.step()


@action(Place.UPDATE)
def step_twice(world: World, number: int) -> None:
    world.step()
    world.step()


@action(Place.UPDATE, renews=True)
def skip(world: World, number: int) -> None:
    """Looks at the gradients and decides against them."""
    norm = nn.utils.get_total_norm([p.grad for p in world.parameters() if p.grad is not None])
    world.see("skipped", norm.float())  # see clip_norm
    world.kept.saved.pop("gradient", None)
    world.optimizer.zero_grad()


@action(Place.UPDATE)
def step_in_no_grad(world: World, number: int) -> None:
    with torch.no_grad():
        world.step()


@action(Place.UPDATE)
def step_in_saved_tensor_hooks(world: World, number: int) -> None:
    packed: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: packed.append(1) or tensor, lambda tensor: tensor
    ):
        world.step()


@action(Place.UPDATE)
def step_in_thread(world: World, number: int) -> None:
    in_thread(lambda: world.step())()


# ---- steps of their own way ---------------------------------------------------------------------


@action(Place.WHOLE)
def step_closure(world: World, number: int) -> None:
    """As Lightning does it: everything in the closure."""

    def run() -> Any:
        world.optimizer.zero_grad()
        return world.in_halves(one)[0]

    def one(half: int) -> Tensor:
        for part in range(world.setup.passes):
            loss = loss_of(world.model, world.rows(half, part))
            world.see("loss", loss)
            loss.backward()
        return loss.detach()

    world.step(run)


@action(Place.WHOLE)
def sharpness(world: World, number: int) -> None:
    """SAM by hand: to the worst point nearby, its gradient, back, step."""
    world.optimizer.zero_grad()
    world.backward()
    moves = []
    with torch.no_grad():
        for p in world.parameters():
            if p.grad is not None:
                move = p.grad * 0.5
                p.add_(move)
                moves.append((p, move))
    world.optimizer.zero_grad()
    world.backward()
    with torch.no_grad():
        for p, move in moves:
            p.sub_(move)
    world.step()


@action(Place.WHOLE)
def scaled(world: World, number: int) -> None:
    """With a GradScaler; its factor is a power of two."""
    if world.setup.optimizer in ("lookahead", "adamw_fused"):
        world.optimizer.zero_grad()
        world.backward()
        world.step()
        return
    scaler = world.kept.saved.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=8.0))
    world.optimizer.zero_grad()
    with_loss(world, lambda model, x: scaler.scale(loss_of(model, x)))
    scaler.step(world.optimizer)
    scaler.update()
    world.gradients_came = False
    world.step_number += 1


@action(Place.WHOLE)
def evaluation_epoch(world: World, number: int) -> None:
    """A step's worth of evaluation; nothing is trained."""
    world.to_evaluation()
    with torch.no_grad():
        for _ in range(2):
            world.see("epoch", loss_of(world.model, world.common_rows()))
    world.model.train()
