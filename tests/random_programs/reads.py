"""Actions that look at parameters and write them, each in another way."""

from __future__ import annotations

import copy
import ctypes
import io
import os
import pickle
import select
import signal
from typing import Any

import torch
from random_programs.registry import action
from random_programs.world import World, in_thread
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

# ---- reads ------------------------------------------------------------------------------------


@action(first=True, alone=True, numbers=4)
def norm(world: World, number: int) -> None:
    world.see("norm", world.parameter(number).norm())


@action(alone=True, numbers=4)
def item(world: World, number: int) -> None:
    world.see("item", world.parameter(number).flatten()[0].item())


@action(alone=True, numbers=4)
def read_data(world: World, number: int) -> None:
    world.see("data", world.parameter(number).data)


@action(alone=True, numbers=4)
def read_numpy(world: World, number: int) -> None:
    world.see("numpy", world.parameter(number).detach().numpy())


@action(alone=True, numbers=4)
def read_repr(world: World, number: int) -> None:
    world.see("repr", repr(world.parameter(number)) + str(world.parameter(number).tolist()))


@action(alone=True, numbers=4)
def read_storage(world: World, number: int) -> None:
    p = world.parameter(number)
    storage = p.untyped_storage()
    world.see("storage", bytes(storage)[p.storage_offset() * 8 :][: p.numel() * 8])


@action(alone=True, numbers=4)
def read_pointer(world: World, number: int) -> None:
    """The address is asked for now, and used now."""
    p = world.parameter(number)
    world.see("pointer", ctypes.string_at(p.data_ptr(), p.numel() * p.element_size()))


@action(alone=True, numbers=4)
def read_dlpack(world: World, number: int) -> None:
    world.see("dlpack", torch.from_dlpack(world.parameter(number).detach()))


@action(alone=True)
def state_dict(world: World, number: int) -> None:
    world.see("state dict", world.model.state_dict())


@action(alone=True)
def save(world: World, number: int) -> None:
    """What rank 0 does now and then."""
    file = io.BytesIO()
    torch.save(world.model.state_dict(), file)
    file.seek(0)
    world.see("saved", torch.load(file))


@action(alone=True)
def save_whole_model(world: World, number: int) -> None:
    if world.setup.model in ("weight_norm", "spectral_norm", "scripted") or world.kept.open:
        return  # torch cannot pickle them, nor our hooks
    world.see("pickled", pickle.loads(pickle.dumps(world.model)).state_dict())


@action(alone=True)
def deepcopy_model(world: World, number: int) -> None:
    world.see("deepcopy", copy.deepcopy(world.model).state_dict())


@action(alone=True)
def vector(world: World, number: int) -> None:
    world.see("vector", nn.utils.parameters_to_vector(world.model.parameters()))


@action(alone=True)
def foreach_norms(world: World, number: int) -> None:
    with torch.no_grad():
        world.see("foreach", torch._foreach_norm(world.parameters()))


@action(alone=True)
def read_in_thread(world: World, number: int) -> None:
    found: list[Any] = []
    in_thread(lambda: found.extend(p.detach().clone() for p in world.parameters()))()
    world.see("in thread", found)


@action(alone=True)
def read_while_training(world: World, number: int) -> None:
    """A thread reads beside the next passes; with whoever writes, its program would be a race."""
    found: list[Any] = []
    parameters = world.parameters()
    wait = in_thread(lambda: found.extend(p.detach().clone() for p in parameters))
    half = world._half

    def end() -> None:
        wait()
        for h in world.halves if half is None else [half]:
            with world.only(h):
                world.see("thread beside training", found)

    if half is None or world.mine(half):
        world.reading.append(end)


@action(alone=True)
def read_in_fork(world: World, number: int) -> None:
    """As the worker of a DataLoader would."""
    world.see("in fork", forked(lambda: pickle.dumps([p.tolist() for p in world.parameters()])))


def forked(run: Any) -> Any:
    """What ``run`` gives in a child process; "hung" if that takes more than 10 s."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = run()
        except BaseException as error:
            answer = repr(error).encode()
        with os.fdopen(theirs, "wb") as out:
            out.write(answer)
        os._exit(0)
    os.close(theirs)
    answer = b""
    with os.fdopen(ours, "rb") as pipe:
        while select.select([pipe], [], [], 10.0)[0]:
            part = os.read(pipe.fileno(), 1 << 16)
            if not part:
                os.waitpid(child, 0)
                return answer
            answer += part
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hung"


# ---- evaluations ------------------------------------------------------------------------------


def evaluated(world: World, model: nn.Module | None = None) -> torch.Tensor:
    model = world.model if model is None else model
    training = model.training
    world.to_evaluation(model)
    try:
        return model(world.common_rows().to(next(model.parameters()).dtype))
    finally:
        model.train(training)


@action(first=True, alone=True)
def evaluate(world: World, number: int) -> None:
    with torch.no_grad():
        world.see("evaluation", evaluated(world))


@action(alone=True)
def evaluate_with_gradients(world: World, number: int) -> None:
    """A forward pass whose loss nobody uses."""
    world.see("forward", evaluated(world))


@action(alone=True)
def evaluate_in_inference_mode(world: World, number: int) -> None:
    with torch.inference_mode():
        result = evaluated(world)
    world.see("inference", result)


@action(alone=True)
def evaluate_in_autocast(world: World, number: int) -> None:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        result = evaluated(world)
    world.see("autocast", result)


@action(alone=True)
def evaluate_in_thread(world: World, number: int) -> None:
    found: list[Any] = []

    def run() -> None:
        with torch.no_grad():
            found.append(evaluated(world))

    in_thread(run)()
    world.see("evaluated in thread", found)


@action(alone=True)
def evaluate_functional(world: World, number: int) -> None:
    values = {name: p * 2 for name, p in world.model.named_parameters()}
    with torch.no_grad():
        world.see("functional", functional_call(world.model, values, world.common_rows()))


@action(alone=True)
def evaluate_ensemble(world: World, number: int) -> None:
    """Two models under ``vmap``."""
    if world.setup.model in (
        "recurrent", "attention", "scripted", "spectral_norm", "embedding", "custom_function",
    ) or world.has_backward_hooks:  # fmt: skip
        return  # vmap has no rule for what they do
    models = [world.model, copy.deepcopy(world.model)]
    training = world.model.training
    for model in models:
        model.eval()
    parameters, buffers = stack_module_state(models)  # type: ignore[arg-type]
    x = world.common_rows()
    with torch.no_grad():
        result = vmap(lambda p, b: functional_call(models[0], (p, b), x))(parameters, buffers)
    world.model.train(training)
    world.see("ensemble", result)


@action(alone=True)
def input_gradients(world: World, number: int) -> None:
    """Slopes for each row, by a transform whose function captures the parameters."""
    if world.has_backward_hooks or world.setup.model in (
        "recurrent", "attention", "scripted", "custom_function", "embedding",
    ):  # fmt: skip
        return
    was_training = world.model.training
    model = world.to_evaluation()
    found = vmap(torch.func.grad(lambda row: model(row[None]).sum()))(world.common_rows())
    model.train(was_training)  # one rank alone may do this
    world.see("slopes", found)


# ---- writes -----------------------------------------------------------------------------------


@action(first=True, numbers=4)
def scale_in_place(world: World, number: int) -> None:
    with torch.no_grad():
        world.parameter(number).mul_(0.75)


@action(numbers=4)
def clamp_data(world: World, number: int) -> None:
    world.parameter(number).data.clamp_(-0.25, 0.25)


@action(numbers=4)
def replace_data(world: World, number: int) -> None:
    p = world.parameter(number)
    p.data = p.data * 0.5 + 0.125


@action(numbers=4)
def write_numpy(world: World, number: int) -> None:
    world.parameter(number).detach().numpy()[...] *= 0.5


@action(numbers=4)
def initialize(world: World, number: int) -> None:
    nn.init.constant_(world.parameter(number), 0.25)


@action(numbers=4)
def copy_into(world: World, number: int) -> None:
    p = world.parameter(number)
    with torch.no_grad():
        p.copy_(torch.ones_like(p) * 0.5)


@action(numbers=4)
def set_tensor(world: World, number: int) -> None:
    p = world.parameter(number)
    with torch.no_grad():
        p.set_(torch.full_like(p, 0.375))


@action(first=True, numbers=4)
def swap_tensors(world: World, number: int) -> None:
    """Before the optimizer is distributed: afterwards it is an error."""
    p = world.parameter(number)
    if world.distributed or world.setup.model in (
        "recurrent", "scripted", "subclassed", "subclassed_by_kind",
    ):  # fmt: skip
        return
    if p.grad is None:
        torch.utils.swap_tensors(p, nn.Parameter(p.detach() * 0.5))


@action()
def decay_by_hand(world: World, number: int) -> None:
    with torch.no_grad():
        torch._foreach_mul_(world.parameters(), 0.75)


@action()
def vector_to_parameters(world: World, number: int) -> None:
    whole = nn.utils.parameters_to_vector(world.model.parameters()).detach()
    nn.utils.vector_to_parameters(whole * 0.5, world.model.parameters())


@action()
def save_copy(world: World, number: int) -> None:
    """To go back to."""
    world.kept.saved["model"] = copy.deepcopy(world.model.state_dict())


@action()
def restore(world: World, number: int) -> None:
    if "model" in world.kept.saved:
        world.model.load_state_dict(world.kept.saved["model"])


# ---- averages ---------------------------------------------------------------------------------


@action()
def moving_average(world: World, number: int) -> None:
    """The first call makes it, others update it."""
    average = world.kept.saved.get("ema")
    if average is None:
        average = world.kept.saved["ema"] = [p.detach().clone() for p in world.parameters()]
    with torch.no_grad():
        for a, p in zip(average, world.parameters(), strict=True):
            a.lerp_(p.to(a.dtype), 0.25)
    world.see("ema", average)


@action()
def averaged_model(world: World, number: int) -> None:
    if world.setup.model in ("weight_norm", "spectral_norm", "scripted"):
        return  # torch cannot copy them
    if "swa" not in world.kept.saved:
        world.kept.saved["swa"] = torch.optim.swa_utils.AveragedModel(world.model)
    world.kept.saved["swa"].update_parameters(world.model)
    world.see("swa", world.kept.saved["swa"].state_dict())
