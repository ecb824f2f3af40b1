"""Actions that keep another way to a parameter's memory, and use it later."""

from __future__ import annotations

import copy
import os
import select
import signal
from typing import Any

import numpy as np
import torch
from random_programs.reads import evaluated
from random_programs.registry import action
from random_programs.world import World
from torch import nn

# ---- taken ------------------------------------------------------------------------------------


@action(first=True, numbers=4)
def keep_data(world: World, number: int) -> None:
    world.kept.tensors.append(world.parameter(number).data)


@action(first=True, numbers=4)
def keep_detached_view(world: World, number: int) -> None:
    world.kept.tensors.append(world.parameter(number).detach().view(-1)[:3])


@action(first=True, numbers=4)
def keep_view(world: World, number: int) -> None:
    """A view that knows its base."""
    with torch.no_grad():
        world.kept.tensors.append(world.parameter(number).view(-1))


@action(first=True, numbers=4)
def keep_numpy(world: World, number: int) -> None:
    world.kept.arrays.append(world.parameter(number).detach().numpy())


@action(first=True, numbers=4)
def keep_dlpack(world: World, number: int) -> None:
    array = np.from_dlpack(world.parameter(number).detach())
    world.kept.readers.append(lambda: array)


@action(first=True, numbers=4)
def keep_storage(world: World, number: int) -> None:
    p = world.parameter(number)
    storage, start, end = p.untyped_storage(), p.storage_offset() * 8, p.numel() * 8
    world.kept.readers.append(lambda: bytes(storage)[start:][:end])


@action(first=True)
def keep_state_dict(world: World, number: int) -> None:
    kept = world.model.state_dict()
    world.kept.readers.append(lambda: kept)


@action(first=True)
def keep_assigned_model(world: World, number: int) -> None:
    """A model for evaluation that was loaded with the trained one's tensors, not copies."""
    if world.setup.model in ("weight_norm", "spectral_norm", "scripted", "recurrent", "tied"):
        return  # they hold their parameters in other places as well
    model = copy.deepcopy(world.model)
    model.load_state_dict(world.model.state_dict(), assign=True)
    world.kept.readers.append(lambda: evaluated_without_gradients(world, model))


@action(first=True)
def keep_functional(world: World, number: int) -> None:
    """Parameters that are detached once, for ``functional_call``."""
    values = {name: p.detach() for name, p in world.model.named_parameters()}
    model = world.model

    def run() -> Any:
        with torch.no_grad():
            return torch.func.functional_call(model, values, world.common_rows())

    if world.setup.model not in ("scripted", "dropout", "spectral_norm"):
        world.kept.readers.append(run)


@action(first=True)
def keep_scripted(world: World, number: int) -> None:
    if world.kept.open:  # TorchScript wants to compile hooks
        return
    if world.setup.model in ("perceptron", "flat", "dropout"):
        model = torch.jit.script(world.model)
        world.kept.readers.append(lambda: evaluated_without_gradients(world, model))


@action(first=True)
def keep_traced(world: World, number: int) -> None:
    """Traced right here, maybe with updates deferred."""
    if not world.has_backward_hooks and world.setup.model in (
        "perceptron",
        "flat",
        "blocks",
        "normed",
        "functional",
        "tied",
    ):
        model = torch.jit.trace(world.model, (world.common_rows(),))
        world.kept.readers.append(lambda: evaluated_without_gradients(world, model))


@action(first=True)
def keep_graph(world: World, number: int) -> None:
    """What ``make_fx`` makes of the model; it captures the parameters."""
    from torch.fx.experimental.proxy_tensor import make_fx

    if world.setup.model in ("perceptron", "flat", "blocks", "functional", "tied"):
        model = world.model
        with torch.no_grad():
            graph = make_fx(lambda x: model(x))(world.common_rows())
        world.see("operators", [str(node.target) for node in graph.graph.nodes])
        world.kept.readers.append(lambda: graph(world.common_rows()))


@action(first=True, numbers=4)
def keep_closure_over(world: World, number: int) -> None:
    """A bound method of the tensor."""
    world.kept.readers.append(world.parameter(number).detach().sum)


@action(first=True, numbers=4)
def keep_split(world: World, number: int) -> None:
    world.kept.tensors.extend(world.parameter(number).detach().unbind(0))


@action(first=True, renews=True)
def shared_with_a_process(world: World, number: int) -> None:
    """Another process reads the parameters' memory whenever it is asked."""
    kept = world.kept
    if kept.tensors or kept.arrays or kept.readers or world.setup.model == "flat":
        return  # share_memory() moves what they look at
    world.model.share_memory()
    arrays = [p.detach().numpy() for p in world.parameters()]
    read, write = start_reader(arrays, world)
    size = sum(array.nbytes for array in arrays)
    del arrays

    def ask() -> bytes:
        os.write(write, b"?")
        answer = b""
        while len(answer) < size and select.select([read], [], [], 10.0)[0]:
            answer += os.read(read, 1 << 16)
        return answer

    world.kept.readers.append(ask)


def start_reader(arrays: list[np.ndarray[Any, Any]], world: World) -> tuple[int, int]:
    questions, ask = os.pipe()
    answers, answer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ask)
        while os.read(questions, 1):
            os.write(answer, b"".join(array.tobytes() for array in arrays))
        os._exit(0)
    os.close(questions)
    os.close(answer)

    def end() -> None:
        os.close(ask)
        os.close(answers)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

    world.kept.open.append(end)
    return answers, ask


def evaluated_without_gradients(world: World, model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return evaluated(world, model)


# ---- used -------------------------------------------------------------------------------------


@action()
def read_kept(world: World, number: int) -> None:
    with torch.no_grad():
        world.see("kept tensors", [tensor + 0 for tensor in world.kept.tensors])
    world.see("kept arrays", world.kept.arrays)
    world.see("kept readers", [read() for read in world.kept.readers])


@action()
def clamp_kept(world: World, number: int) -> None:
    with torch.no_grad():
        for tensor in world.kept.tensors:
            tensor.clamp_(-0.25, 0.25)


@action()
def write_kept_arrays(world: World, number: int) -> None:
    for array in world.kept.arrays:
        np.multiply(array, 0.5, out=array)


@action()
def forget_kept(world: World, number: int) -> None:
    world.kept.tensors.clear()
    world.kept.arrays.clear()


@action()
def read_flat(world: World, number: int) -> None:
    if world.setup.model == "flat":
        world.see("flat buffer", world.model.flat + 0)


@action()
def scale_flat(world: World, number: int) -> None:
    if world.setup.model == "flat":
        world.model.flat.mul_(0.75)
