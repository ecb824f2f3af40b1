"""Actions on the optimizer: what belongs to it, what follows it, others in its place."""

from __future__ import annotations

import copy
import gc
from collections import defaultdict
from typing import Any

import torch
from random_programs.models import make_model
from random_programs.optimizers import make_optimizer
from random_programs.registry import Place, action
from random_programs.world import World

# ---- state ------------------------------------------------------------------------------------


@action(alone=True)
def read_state(world: World, number: int) -> None:
    values = [world.optimizer.state.get(p, {}) for p in world.parameters()]
    world.see("state", values)


@action()
def keep_state(world: World, number: int) -> None:
    """The tensors of the state themselves."""
    for p in world.parameters():
        for value in world.optimizer.state.get(p, {}).values():
            if isinstance(value, torch.Tensor):
                world.kept.readers.append(value.clone if value.dim() == 0 else value.sum)


@action(alone=True)
def read_optimizer_state_dict(world: World, number: int) -> None:
    world.see("optimizer state", world.optimizer.state_dict()["state"])


@action()
def keep_optimizer_state_dict(world: World, number: int) -> None:
    kept = world.optimizer.state_dict()
    world.kept.readers.append(lambda: kept["state"])


@action()
def clear_state(world: World, number: int) -> None:
    if world.setup.optimizer not in ("adagrad", "lookahead"):  # they make it only once
        world.optimizer.state.clear()


@action()
def new_state(world: World, number: int) -> None:
    if world.setup.optimizer not in ("adagrad", "lookahead"):
        world.optimizer.state = defaultdict(dict)


@action(numbers=4)
def forget_state_of(world: World, number: int) -> None:
    if world.setup.optimizer not in ("adagrad", "lookahead"):
        world.optimizer.state.pop(world.parameter(number), None)


@action()
def scale_state(world: World, number: int) -> None:
    """As ReLoRA does when it restarts."""
    for state in world.optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                value.mul_(0.5)


@action()
def save_optimizer(world: World, number: int) -> None:
    world.kept.saved["optimizer"] = copy.deepcopy(world.optimizer.state_dict())


@action()
def restore_optimizer(world: World, number: int) -> None:
    saved = world.kept.saved.get("optimizer")
    if saved is not None and [len(g["params"]) for g in saved["param_groups"]] == [
        len(g["params"]) for g in world.optimizer.param_groups
    ]:
        world.optimizer.load_state_dict(saved)


@action(alone=True)
def deepcopy_optimizer(world: World, number: int) -> None:
    if world.setup.optimizer != "lookahead":
        world.see("optimizer copied", copy.deepcopy(world.optimizer).state_dict()["state"])


# ---- hyper-parameters and attributes ------------------------------------------------------------


@action(first=True)
def halve_rate(world: World, number: int) -> None:
    for group in world.optimizer.param_groups:
        group["lr"] *= 0.5


@action()
def set_rate_in_place(world: World, number: int) -> None:
    rate = world.optimizer.param_groups[0]["lr"]
    if isinstance(rate, torch.Tensor):
        rate.fill_(0.005)
    else:
        world.optimizer.param_groups[0]["lr"] = 0.005


@action()
def change_momentum(world: World, number: int) -> None:
    for group in world.optimizer.param_groups:
        if "betas" in group:
            group["betas"] = (0.8, 0.95)
        elif group.get("momentum"):
            group["momentum"] = 0.7


@action()
def set_attribute(world: World, number: int) -> None:
    world.optimizer.factor = 0.5 * getattr(world.optimizer, "factor", 1.0)


@action(first=True, numbers=3)
def make_scheduler(world: World, number: int) -> None:
    schedulers = torch.optim.lr_scheduler
    if world.setup.optimizer in ("lookahead", "adam_tensor_lr", "counting"):
        return
    optimizer = world.optimizer
    world.kept.saved["scheduler"] = (
        lambda: schedulers.ExponentialLR(optimizer, 0.5),
        lambda: schedulers.StepLR(optimizer, 2, 0.25),
        lambda: schedulers.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)),
    )[number % 3]()


@action()
def schedule(world: World, number: int) -> None:
    if "scheduler" in world.kept.saved:
        world.kept.saved["scheduler"].step()
        world.see("rates", world.kept.saved["scheduler"].get_last_lr())


@action(first=True)
def hook_after_step(world: World, number: int) -> None:
    """Reads the new weights as soon as step() ends."""
    model = world.model

    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        world.see("after step", [p.detach().sum() for p in model.parameters()])

    world.kept.open.append(world.optimizer.register_step_post_hook(hook).remove)


@action(first=True)
def hook_before_step(world: World, number: int) -> None:
    """Adds to the gradients just before they are used."""

    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        if world.rank is not None:
            optimizer.synchronize()  # this rank may have no gradient where another has one
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if p.grad is not None:
                p.grad.add_(0.125)

    world.kept.open.append(world.optimizer.register_step_pre_hook(hook).remove)


# ---- groups -----------------------------------------------------------------------------------


@action(numbers=4)
def drop_parameter(world: World, number: int) -> None:
    """Takes a parameter out of training by hand."""
    group = world.optimizer.param_groups[0]
    if len(group["params"]) > 2:
        world.optimizer.state.pop(group["params"].pop(number % len(group["params"])), None)


@action()
def move_to_new_group(world: World, number: int) -> None:
    """The last parameter of the first group gets a group of its own."""
    group = world.optimizer.param_groups[0]
    if len(group["params"]) > 2:
        moved = group["params"].pop()
        rest = {key: value for key, value in group.items() if key != "params"}
        world.optimizer.param_groups.append({"params": [moved], **rest, "weight_decay": 0.1})


@action()
def add_parameters(world: World, number: int) -> None:
    """The model grows by a layer, and the optimizer learns of it."""
    if world.setup.model not in ("perceptron", "blocks", "normed") or "grown" in world.kept.saved:
        return
    if world.setup.optimizer == "lookahead":
        return
    world.kept.saved["grown"] = True
    with torch.random.fork_rng():
        torch.manual_seed(3)
        layer = torch.nn.Linear(2, 2).to(world.dtype)
    world.model.append(layer)
    world.optimizer.add_param_group({"params": list(layer.parameters())})


@action(numbers=4, renews=True)
def freeze(world: World, number: int) -> None:
    """All but the last module can be frozen, so that there is something to train."""
    parameters = world.parameters()[:-2]
    p = parameters[number % len(parameters)]
    p.requires_grad_(False)
    if world.setup.is_sum:
        p.grad = None  # it would be summed over the ranks once more in each step, as by Horovod


@action()
def unfreeze(world: World, number: int) -> None:
    world.model.requires_grad_(True)


# ---- others -----------------------------------------------------------------------------------


@action(renews=True)
def new_optimizer(world: World, number: int) -> None:
    """Drops the optimizer, maybe with updates deferred, and goes on with another."""
    if len(world.kept.open) or "grown" in world.kept.saved or "scheduler" in world.kept.saved:
        return
    world.optimizer.zero_grad()
    world.optimizer = None
    gc.collect()
    world.optimizer = world.distribute(make_optimizer("momentum", world.model))


@action()
def broadcast(world: World, number: int) -> None:
    """Changes nothing: the ranks are equal."""
    import hvd_order.torch as hvd

    if world.rank is not None:
        hvd.broadcast_parameters(world.model.state_dict(), root_rank=0)


@action()
def flush(world: World, number: int) -> None:
    if world.rank is not None:
        world.optimizer.flush()


@action()
def train_other_model(world: World, number: int) -> None:
    """A step of a second model with an optimizer of its own."""
    if world.other is None:
        world.other = make_model("perceptron", seed=2)
        world.other_optimizer = world.distribute(make_optimizer("adam", world.other), world.other)
    came = world.gradients_came
    world.other_optimizer.zero_grad()
    world.backward(world.other_optimizer, world.other)
    world.other_optimizer.step()
    world.gradients_came = came


@action(alone=True)
def read_other_model(world: World, number: int) -> None:
    if world.other is not None:
        world.see("other", [p.detach() for p in world.other.parameters()])


@action(Place.BETWEEN)
def distil(world: World, number: int) -> None:
    """Reads the trained model's outputs as a target; no gradients."""
    with torch.no_grad():
        target = world.to_evaluation()(world.common_rows().to(world.parameter(0).dtype))
    world.model.train()
    world.see("target", target)
