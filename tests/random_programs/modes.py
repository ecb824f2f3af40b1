"""Actions that put the program into a mode, or read parameters within somebody else's."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import torch
from random_programs.reads import evaluated
from random_programs.registry import action
from random_programs.world import World
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# ---- modes that last --------------------------------------------------------------------------


@action(first=True)
def default_double(world: World, number: int) -> None:
    torch.set_default_dtype(torch.float64)


@action(first=True)
def default_single(world: World, number: int) -> None:
    torch.set_default_dtype(torch.float32)


@action(first=True)
def deterministic(world: World, number: int) -> None:
    torch.use_deterministic_algorithms(not torch.are_deterministic_algorithms_enabled())


@action(first=True)
def evaluation_mode(world: World, number: int) -> None:
    world.to_evaluation()


@action(first=True)
def training_mode(world: World, number: int) -> None:
    world.model.train()


@action(first=True)
def seed(world: World, number: int) -> None:
    torch.manual_seed(11)


@action(alone=False)
def random_numbers(world: World, number: int) -> None:
    world.see("random", torch.rand(2))


@action()
def collect_garbage(world: World, number: int) -> None:
    gc.collect()


# ---- somebody else's mode, around a reader ------------------------------------------------------


class Operators(TorchDispatchMode):
    """Notes which operators run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """Notes which functions of torch are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


@action(alone=True)
def count_operators(world: World, number: int) -> None:
    """As a FLOP counter does."""
    with torch.no_grad(), Operators() as operators:
        result = evaluated(world)
    world.see("operators", operators.names)
    world.see("evaluation", result)


@action(alone=True)
def count_functions(world: World, number: int) -> None:
    with torch.no_grad(), Functions() as functions:
        result = evaluated(world)
    world.see("functions", functions.names)
    world.see("evaluation", result)


@action(alone=True)
def fake_tensors(world: World, number: int) -> None:
    """Shapes without numbers; parameters are turned into fakes on their way in."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    if world.setup.model not in ("perceptron", "flat", "blocks", "normed", "functional", "tied"):
        return
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        result = world.model(mode.from_tensor(world.common_rows()))
    world.see("fake", (list(result.shape), str(result.dtype)))


@action(alone=True)
def fake_parameter(world: World, number: int) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(p) for p in world.parameters()]
    world.see("fakes", [list(fake.shape) for fake in fakes])


@action(alone=True)
def default_device(world: World, number: int) -> None:
    """What is made within goes elsewhere, unless it says where."""
    with torch.no_grad(), torch.device("meta"):
        norms = [float(p.norm()) for p in world.parameters()]
    world.see("under a default device", norms)


@action(alone=True)
def saved_tensor_hooks(world: World, number: int) -> None:
    packed: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = evaluated(world)
    world.see("packed", packed)
    world.see("evaluation", result)


@action(alone=True)
def detect_anomaly(world: World, number: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():
            world.see("evaluation", evaluated(world))


@action(alone=True)
def profile(world: World, number: int) -> None:
    with torch.no_grad(), torch.profiler.profile() as profiler:
        result = evaluated(world)
    names = [event.name for event in profiler.events() if event.name.startswith("aten::")]
    world.see("profiled", sorted(name for name in set(names) if not name.startswith("aten::_")))
    world.see("evaluation", result)


@action(alone=True, numbers=4)
def read_under_vmap(world: World, number: int) -> None:
    p = world.parameter(number)
    with torch.no_grad():
        world.see("vmap", torch.vmap(lambda row: (p * row).sum())(torch.arange(3.0)))


@action(alone=True, numbers=4)
def derivative_with_respect_to(world: World, number: int) -> None:
    p = world.parameter(number)
    world.see("grad", torch.func.grad(lambda value: (value**2).sum() / 2)(p.detach()))
    world.see("captured", torch.func.grad(lambda s: (p * s).sum())(torch.ones(()).double()))


@action(alone=True, numbers=4)
def forward_mode(world: World, number: int) -> None:
    p = world.parameter(number)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(p.detach(), torch.ones_like(p))
        tangent = torch.autograd.forward_ad.unpack_dual((dual * p.detach()).sum()).tangent
        world.see("tangent", tangent)


@action(alone=True)
def trace_now(world: World, number: int) -> None:
    """Traced, called and dropped; the trace must hold the model and nothing else."""
    if not world.has_backward_hooks and world.setup.model in (
        "perceptron",
        "flat",
        "blocks",
        "functional",
        "tied",
    ):
        traced = torch.jit.trace(world.model, (world.common_rows(),), check_trace=False)
        kinds = [node.kind() for node in traced.inlined_graph.nodes()]
        world.see("traced", [kind for kind in kinds if kind.startswith("aten::")])
        with torch.no_grad():
            world.see("trace", [traced(world.common_rows()) for _ in range(2)])


@action(alone=True)
def meta_copy(world: World, number: int) -> None:
    with torch.device("meta"):
        shapes = [list(torch.empty_like(p, device="meta").shape) for p in world.parameters()]
    world.see("meta", shapes)


# ---- casts ------------------------------------------------------------------------------------


@action(first=True, renews=True)
def to_single_and_back(world: World, number: int) -> None:
    """With gradients, if there are any: a module casts them as well."""
    world.cast(torch.float32)


@action(first=True, renews=True)
def to_half_and_back(world: World, number: int) -> None:
    world.cast(torch.bfloat16)


@action(first=True)
def to_same_device(world: World, number: int) -> None:
    world.model.cpu().to("cpu", world.dtype)


@action(numbers=4, renews=True)
def apply_to_layer(world: World, number: int) -> None:
    world.layer(number)._apply(lambda tensor: tensor.clone())


# ---- hooks ------------------------------------------------------------------------------------


@action(first=True, numbers=4)
def hook_before_forward(world: World, number: int) -> None:
    """Reads a parameter of another module, before each forward pass of one."""
    p = world.parameter(number + 1)

    def hook(module: nn.Module, args: Any) -> None:
        if not is_transformed(args):
            world.see("hook", p.detach().sum())

    handle = world.layer(number).register_forward_pre_hook(hook)
    world.kept.open.append(handle.remove)


def is_transformed(args: Any) -> bool:
    """Whether there are no numbers to look at: under a transform, a trace or with fakes."""
    return (
        torch.jit.is_tracing()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or any(type(arg) is not torch.Tensor for arg in args)
        or torch._C._len_torch_dispatch_stack() > 0
        or torch.overrides._len_torch_function_stack() > 0
    )


@action(first=True, numbers=4)
def hook_after_forward(world: World, number: int) -> None:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if not is_transformed(args):
            for p in module.parameters(recurse=False):
                world.see("hook after", p)

    handle = world.layer(number).register_forward_hook(hook)
    world.kept.open.append(handle.remove)


@action(first=True, numbers=4)
def hook_on_gradient(world: World, number: int) -> None:
    """Doubles a gradient before it is accumulated."""
    p = world.parameter(number)
    if p.requires_grad:
        world.kept.open.append(p.register_hook(lambda gradient: gradient * 2).remove)


@action(first=True, numbers=4)
def hook_backward(world: World, number: int) -> None:
    """A full backward hook that reads the module's parameters."""
    if world.setup.model in ("scripted", "recurrent", "attention", "flat"):
        return

    def hook(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        for p in module.parameters(recurse=False):
            world.see("backward hook", p.detach().sum())

    world.has_backward_hooks = True
    world.kept.open.append(world.layer(number).register_full_backward_hook(hook).remove)
