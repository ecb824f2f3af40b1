"""Actions of programs that go on after an exception, and of those with several threads."""

from __future__ import annotations

from typing import Any

import torch
from random_programs.models import make_model
from random_programs.optimizers import make_optimizer
from random_programs.registry import Place, action
from random_programs.world import Setup, World, in_thread, loss_of
from torch import Tensor

# ---- a backward pass that raises -----------------------------------------------------------------


class OutOfMemoryError(RuntimeError):
    """What the program's hook raises in the middle of a backward pass."""


def raise_in_backward(world: World, which: int) -> None:
    """Forward and backward passes on all ranks, of which the last raises."""
    trainable = [p for p in world.parameters() if p.requires_grad]
    p = trainable[which % len(trainable)]
    due = [False]

    def hook(gradient: Tensor) -> None:
        if due[0]:
            raise OutOfMemoryError

    def run(half: int) -> None:
        for part in range(world.setup.passes):
            loss = loss_of(world.model, world.rows(half, part))
            due[0] = part == world.setup.passes - 1
            try:
                loss.backward()
            except OutOfMemoryError:
                world.see("raised", True)
            finally:
                due[0] = False

    handle = p.register_hook(hook)
    try:
        world.in_halves(run)
    finally:
        handle.remove()
    world.gradients_came = False


def clear(world: World, how: int) -> None:
    """Drops the gradients of a batch that is skipped."""
    if how == 0 or world.setup.passes > 1:  # see docs/limits.md on unfinished accumulations
        world.optimizer.zero_grad()
    elif how == 1:
        world.model.zero_grad()
    elif how == 2:
        for p in world.parameters():
            p.grad = None
    else:
        world.optimizer.zero_grad(set_to_none=False)
    # What a pass that has raised leaves is each rank's own: nobody sums it.
    trained = {p for group in world.optimizer.param_groups for p in group["params"]}
    for p in world.parameters():
        if p not in trained:
            p.grad = None


@action(Place.WHOLE, numbers=12)
def skip_after_exception(world: World, number: int) -> None:
    """All ranks skip a batch whose backward pass has raised."""
    world.optimizer.zero_grad()
    raise_in_backward(world, number // 4)
    clear(world, number % 4)


@action(Place.WHOLE, numbers=12)
def repeat_after_exception(world: World, number: int) -> None:
    """The batch is tried once more, as after out of memory."""
    world.optimizer.zero_grad()
    raise_in_backward(world, number // 4)
    clear(world, number % 4)
    world.backward()
    world.step()


@action(Place.WHOLE, numbers=4)
def exception_in_forward(world: World, number: int) -> None:
    def hook(module: Any, args: Any) -> None:
        raise OutOfMemoryError

    world.optimizer.zero_grad()
    handle = world.layer(number).register_forward_pre_hook(hook)
    try:
        loss_of(world.model, world.rows(0))
    except OutOfMemoryError:
        pass
    finally:
        handle.remove()


@action(alone=True, numbers=4)
def exception_in_reader(world: World, number: int) -> None:
    """An operator raises that has a parameter among its operands; the next read is right."""
    p = world.parameter(number)
    try:
        torch.mm(p, torch.ones(99, 1, dtype=p.dtype))
    except RuntimeError:
        world.see("after an error", p.detach())


@action(Place.GRADIENTS, alone=True, numbers=4)
def exception_with_gradient(world: World, number: int) -> None:
    gradient = world.parameter(number).grad
    if gradient is not None:
        try:
            torch.mm(gradient, torch.ones(99, 1, dtype=gradient.dtype))
        except RuntimeError:
            world.see("after an error", gradient + 0)


# ---- threads ----------------------------------------------------------------------------------


class Beside(World):
    """A second model, which a thread of the program trains."""

    def _side_state(self) -> Any:
        return None  # random numbers and buffers belong to the program's main thread

    def _restore(self, state: Any) -> None:
        del state


def made_beside(world: World) -> Beside:
    """Made by the main thread, as the optimizers of a program mostly are."""
    if "beside" not in world.kept.saved:
        # Two threads meet in any order, so names must tell their models apart.
        options = tuple(o for o in world.setup.options if o not in ("passes2", "unnamed"))
        with torch.random.fork_rng():
            beside = Beside(Setup("perceptron", "momentum", options), world.rank)
        beside.model, beside.prefix = make_model("perceptron", seed=4), "beside"
        optimizer = make_optimizer("momentum", beside.model)
        beside.optimizer = beside.distribute(optimizer)
        world.kept.saved["beside"] = beside
    kept: Beside = world.kept.saved["beside"]
    return kept


@action(first=True, numbers=3)
def train_beside(world: World, number: int) -> None:
    """A thread trains a second model beside the next backward pass of the first, or beside the
    registration of that one.
    """
    beside = made_beside(world)
    beside.label = world.label

    def run() -> None:
        for _ in range(number + 1):
            beside.optimizer.zero_grad()
            beside.backward()
            beside.step()

    wait = in_thread(run)

    def end() -> None:
        wait()
        for half in world.halves:
            world.seen[half] += beside.seen[half]
            beside.seen[half] = []
            with world.only(half):
                world.see("trained beside", list(beside.model.parameters()))

    world.reading.append(end)


@action(alone=True)
def evaluate_while_training(world: World, number: int) -> None:
    """A thread runs the model beside the next passes."""
    if world.setup.model not in ("perceptron", "blocks", "functional", "tied", "flat"):
        return
    if world.has_backward_hooks or world.kept.open:
        return
    model, x = world.model, world.common_rows().to(world.parameter(0).dtype)
    found: list[Tensor] = []

    def run() -> None:
        with torch.no_grad():
            found.append(model(x))

    read_beside(world, run, found)


def read_beside(world: World, run: Any, found: list[Any]) -> None:
    wait, half = in_thread(run), world._half

    def end() -> None:
        wait()
        for h in world.halves if half is None else [half]:
            with world.only(h):
                world.see("thread beside training", found)

    if half is None or world.mine(half):
        world.reading.append(end)
        world.shares_model = True


@action(alone=True)
def save_while_training(world: World, number: int) -> None:
    """A thread copies the state dict beside the next passes, as an asynchronous checkpoint does."""
    model = world.model
    found: list[Any] = []
    names = [name for name, _ in model.named_parameters()]

    def run() -> None:
        state = model.state_dict()
        found.extend(state[name].clone() for name in names)

    read_beside(world, run, found)


@action(Place.GRADIENTS, alone=True)
def read_gradients_in_thread(world: World, number: int) -> None:
    found: list[Any] = []
    parameters = world.parameters()
    in_thread(lambda: found.extend(None if p.grad is None else p.grad + 0 for p in parameters))()
    world.see("gradients in thread", found)


@action(Place.GRADIENTS, alone=True)
def norms_in_two_threads(world: World, number: int) -> None:
    """Two threads look at the gradients at the same time."""
    parameters = [p for p in world.parameters() if p.grad is not None]
    found: list[list[Tensor]] = [[], []]

    def run(mine: list[Tensor]) -> None:
        mine.extend(p.grad.abs().max() for p in parameters if p.grad is not None)

    waits = [in_thread(lambda mine=mine: run(mine)) for mine in found]  # type: ignore[misc]
    for wait in waits:
        wait()
    world.see("in two threads", found)


@action(alone=True)
def read_in_two_threads(world: World, number: int) -> None:
    parameters = world.parameters()
    found: list[list[Tensor]] = [[], []]

    def run(mine: list[Tensor], order: int) -> None:
        mine.extend(p.detach().clone() for p in parameters[::order])

    waits = [
        in_thread(lambda mine=mine, order=order: run(mine, order))  # type: ignore[misc]
        for mine, order in zip(found, (1, -1), strict=True)
    ]
    for wait in waits:
        wait()
    world.see("in two threads", found)
