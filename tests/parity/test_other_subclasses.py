"""Readers of pending parameters and of gradients in flight that are more than an operator: tensors
of other subclasses, modes, function transforms, and what asks for exact classes.

Each acts in a plain program and in one whose update is deferred, and must see the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import eq, ne
from typing import Any

import torch
from helpers.on_ranks import on_ranks
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import hvd_order.torch as hvd
from hvd_order.torch.parameters.read_guard import InFlightGradient, PendingParameter, is_armed

PRODUCTS = (torch.mul, Tensor.mul, Tensor.__mul__, functional.linear, functional.layer_norm)


class Kept(Tensor):
    """Every result has its class, by torch's own rule."""


class Double(Tensor):
    """Doubles products; does not look at the classes of the others."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result * 2 if func in PRODUCTS else result


class Tells(Tensor):
    """Tells every call and its classes."""

    calls: list[Any]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Tells.calls.append((getattr(func, "__name__", ""), [each.__name__ for each in types]))
        return super().__torch_function__(func, types, args, kwargs)


class Refuses(Tensor):
    """Leaves every function to others."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented


class Duck:
    """No tensor, and has the method as one of each object."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(each.factor if each is self else each for each in args), **(kwargs or {}))


class ModeThatDoubles(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func in PRODUCTS else result


class ModeThatRefuses(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented


def ones(kind: type[Tensor], *shape: int) -> Any:
    return torch.full(shape, 0.5).as_subclass(kind)


def seen(value: Any) -> list[Any]:
    """What a program can tell of a result."""
    if isinstance(value, Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            plain = value.detach().clone().as_subclass(Tensor)
        return [type(value).__name__, value.requires_grad, plain]
    if isinstance(value, dict):
        value = list(value.items())
    if isinstance(value, (list, tuple)):
        return [each for item in value for each in seen(item)]
    return [value]


def error_of(act: Callable[[], Any]) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "none"


def told(act: Callable[[Any], Any]) -> Any:
    Tells.calls = []
    result = act(ones(Tells, 16))
    return type(result).__name__, Tells.calls


def with_mode(mode: Any, act: Callable[[], Any]) -> Any:
    with mode:
        return act()


def replaced(model: nn.Sequential, make: Callable[[Any], Any]) -> Any:
    model[0].again = make(model[0].weight)
    return model[0].again, [name for name, _ in model.named_parameters()]


# With the update of every parameter of the model to come.
READERS: dict[str, Callable[[Any, Tensor], Any]] = {
    "class last": lambda m, x: m[0].weight * ones(Kept, 16),
    "in Python": lambda m, x: m[3](ones(Kept, 2, 32)),
    "ignores others, first": lambda m, x: ones(Double, 16) * m[0].weight,
    "ignores others, last": lambda m, x: m[0].weight * ones(Double, 16),
    "ignores others, in Python": lambda m, x: m[3](ones(Double, 2, 32)),
    "keyword": lambda m, x: functional.linear(
        input=ones(Double, 16), weight=m[0].weight, bias=m[0].bias),
    "list": lambda m, x: torch.cat([m[0].weight, ones(Kept, 2, 16), m[2].weight[:, :16]]),
    "out": lambda m, x: with_mode(
        torch.no_grad(), lambda: torch.mul(m[0].weight, 2, out=ones(Kept, 32, 16))),
    "in place": lambda m, x: ones(Kept, 32, 16).copy_(m[0].weight),
    "index": lambda m, x: ones(Kept, 40)[m[0].weight.long()],
    "set item": lambda m, x: (y := ones(Kept, 32, 16)).__setitem__(0, m[0].weight[0]) or y,
    "tells, first": lambda m, x: told(lambda t: t * m[0].weight),
    "tells, last": lambda m, x: told(lambda t: m[0].weight + t),
    "tells of Python": lambda m, x: told(lambda t: functional.layer_norm(t, (16,), m[0].weight[0])),
    "two classes": lambda m, x: told(lambda t: torch.cat([t, m[0].bias, ones(Double, 16)])),
    "refuses": lambda m, x: error_of(lambda: m[0].weight + ones(Refuses, 16)),
    "refuses, and another": lambda m, x: torch.cat(
        [m[0].bias, ones(Refuses, 16), ones(Double, 16)]),
    "duck": lambda m, x: torch.mul(m[0].weight, Duck(3.0)),
    "mode": lambda m, x: with_mode(ModeThatDoubles(), lambda: m(x)),
    "mode reads shapes": lambda m, x: with_mode(
        ModeThatDoubles(), lambda: (m[0].weight.shape, m[0].weight.grad, m[0].weight * 2)),
    "mode and class": lambda m, x: with_mode(ModeThatDoubles(), lambda: m(x.as_subclass(Kept))),
    "mode refuses": lambda m, x: error_of(
        lambda: with_mode(ModeThatRefuses(), lambda: m[0].weight * 2)),
    "func.jacrev": lambda m, x: torch.func.jacrev(lambda w: w @ x[0])(m[0].weight),
    "func.jacfwd": lambda m, x: torch.func.jacfwd(lambda b: b.square())(m[0].bias),
    "func.hessian": lambda m, x: torch.func.hessian(lambda b: b.pow(3).sum())(m[0].bias),
    "func.vjp": lambda m, x: torch.func.vjp(lambda w: w @ x[0], m[0].weight)[1](torch.ones(32)),
    "func.jvp": lambda m, x: torch.func.jvp(
        lambda w: w @ x[0], (m[0].weight,), (torch.ones(32, 16),)),
    "func.linearize": lambda m, x: torch.func.linearize(lambda w: w @ x[0], m[0].weight)[1](
        torch.ones(32, 16)),
    "func.functionalize": lambda m, x: torch.func.functionalize(lambda w: w * 2)(m[0].weight),
    "jacobian": lambda m, x: torch.autograd.functional.jacobian(lambda b: b * 2, m[0].bias),
    "as_subclass": lambda m, x: m[0].weight.as_subclass(Kept),
    "_make_subclass": lambda m, x: Tensor._make_subclass(Kept, m[0].weight),
    "Parameter without gradient": lambda m, x: replaced(m, lambda p: nn.Parameter(p, False)),
    "Parameter of a class": lambda m, x: replaced(m, lambda p: Own(p)),
    "Buffer": lambda m, x: nn.Buffer(m[0].weight),
    "classes": lambda m, x: [
        (eq(type(p), nn.Parameter), type(p) in (Tensor, nn.Parameter), type(p).__name__,
         {nn.Parameter: 1}.get(type(p)), ne(type(p), nn.Parameter), eq(type(p), Tensor),
         str(type(p)))
        for p in m.parameters()],
    "metadata": lambda m, x: [
        (p.shape, p.dtype, p.size(), p.size(0), p.dim(), p.numel(), len(p), p.stride(),
         p.requires_grad, p.is_leaf, p.grad_fn, p.is_contiguous(), p.element_size(), p.grad is None)
        for p in m.parameters()],
    "del grad": lambda m, x: (m[0].weight.__class__.grad.__delete__(m[0].weight), m[0].weight.grad),
}  # fmt: skip


class Own(nn.Parameter):
    pass


def model_and_optimizer(wrap: bool, **how: Any) -> tuple[Any, Any]:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 4)
    )
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if wrap:
        names = list(model.named_parameters())
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=names, **how)
    return model, optimizer


def rows(step: int) -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(step))


def one_step(model: Any, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    model(rows(step)).square().mean().backward()
    optimizer.step()


def check_same(plain: list[Any], wrapped: list[Any]) -> None:
    assert len(plain) == len(wrapped), (plain, wrapped)
    for one, other in zip(plain, wrapped, strict=True):
        if isinstance(one, Tensor):
            assert one.dtype == other.dtype
            assert torch.equal(one, other), (one - other).abs().max()
        else:
            assert one == other, (one, other)


def read_after_steps(name: str, wrap: bool) -> list[Any]:
    model, optimizer = model_and_optimizer(wrap)
    for step in range(4):
        one_step(model, optimizer, step)
    if wrap:
        assert all(type(p) is PendingParameter for p in model.parameters()), name
    found = seen(READERS[name](model, rows(50)))
    for step in range(4, 6):
        one_step(model, optimizer, step)
    return [*found, *seen([p.detach() for p in model.parameters()])]


@on_ranks(2)
def test_readers_see_what_they_see_in_a_plain_program() -> None:
    names = list(READERS)
    failed = {}
    for name in names:
        try:
            check_same(read_after_steps(name, False), read_after_steps(name, True))
        except BaseException as error:
            failed[name] = f"{type(error).__name__}: {error}"
    assert failed == {}


# ---- gradients ---------------------------------------------------------------------------------


def gradient_class(kind: type[Tensor]) -> Callable[[Any], Any]:
    return lambda m: m[0].bias.grad * ones(kind, 32)


GRADIENT_READERS: dict[str, Callable[[Any], Any]] = {
    "class": gradient_class(Kept),
    "ignores others": gradient_class(Double),
    "tells": lambda m: told(lambda t: m[0].weight.grad + t),
    "class first": lambda m: ones(Kept, 32) * m[0].bias.grad,
    "factor of a class": lambda m: m[0].bias.grad.mul_(torch.tensor(0.5).as_subclass(Double)),
    "factors of a class": lambda m: (
        torch._foreach_mul_([m[0].bias.grad, m[2].bias.grad], ones(Double)) and None,
        m[0].bias.grad.clone(),
    ),
    "with parameters": lambda m: torch.cat([m[0].bias, m[0].bias.grad, ones(Kept, 3)]),
    "duck": lambda m: torch.mul(m[0].bias.grad, Duck(3.0)),
    "mode": lambda m: with_mode(ModeThatDoubles(), lambda: torch.mul(m[0].bias.grad, 3)),
    "after norms": lambda m: (
        nn.utils.clip_grad_norm_(m.parameters(), 0.1) * 0, gradient_class(Double)(m),
        gradient_class(Kept)(m), torch.cat([m[0].bias.grad, ones(Kept, 3)]),
        ones(Kept, 32).copy_(m[0].bias.grad), m[0].bias.grad.add_(ones(Kept, 32)),
    ),
}  # fmt: skip


def gradients_before_step(name: str, wrap: bool) -> list[Any]:
    model, optimizer = model_and_optimizer(wrap)
    found = []
    for step in range(5):
        optimizer.zero_grad()
        model(rows(step)).square().mean().backward()
        if step > 2:
            if wrap:
                assert type(model[0].bias.grad) is InFlightGradient
            found += seen(GRADIENT_READERS[name](model))
        optimizer.step()
    return [*found, *seen([p.detach() for p in model.parameters()])]


@on_ranks(2)
def test_readers_of_gradients_see_what_they_see_in_a_plain_program() -> None:
    names = list(GRADIENT_READERS)
    failed = {}
    for name in names:
        try:
            check_same(gradients_before_step(name, False), gradients_before_step(name, True))
        except BaseException as error:
            failed[name] = f"{type(error).__name__}: {error}"
    assert failed == {}


# ---- training ----------------------------------------------------------------------------------


class Scaled(nn.Module):
    """Reads its parameter through a class that has its own product."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.linear = nn.Linear(16, 4)
        self.first = first

    def forward(self, x: Any) -> Tensor:
        doubles = x.as_subclass(Double)
        scaled = doubles * self.scale if self.first else self.scale * doubles
        return self.linear(scaled.as_subclass(Tensor))  # type: ignore[no-any-return]


def trained(first: bool, wrap: bool) -> list[Any]:
    torch.manual_seed(4)
    model = Scaled(first)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if wrap:
        optimizer = hvd.DistributedOptimizer(optimizer, list(model.named_parameters()))
    for step in range(8):
        one_step(model, optimizer, step)
    if wrap:
        report = optimizer.overlap_report()
        assert report.deferred_parameters == report.parameters, str(report)
    return seen([p.detach() for p in model.parameters()])


CLASSES_TOLD: list[str] = []


class ToldMeta(type(nn.Parameter)):  # type: ignore[misc]
    def __new__(mcs, name: str, *args: Any, **kwargs: Any) -> Any:
        CLASSES_TOLD.append(name)
        return super().__new__(mcs, name, *args)

    def __init__(cls, name: str, *args: Any, **kwargs: Any) -> None:
        CLASSES_TOLD.append(name)
        super().__init__(name, *args)


class Registered(nn.Parameter, metaclass=ToldMeta):
    """Its subclasses need an argument, and register themselves; it has a shape of its own."""

    def __init_subclass__(cls, *, kind: str) -> None:
        CLASSES_TOLD.append(kind)

    @property
    def nbytes(self) -> int:
        return 7


def registered(wrap: bool) -> list[Any]:
    CLASSES_TOLD.clear()
    torch.manual_seed(5)
    model = nn.Linear(16, 4)
    model.weight = Registered(model.weight.data)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
    if wrap:
        optimizer = hvd.DistributedOptimizer(optimizer, list(model.named_parameters()))
    found: list[Any] = []
    for step in range(5):
        one_step(model, optimizer, step)
        if wrap and step > 2:
            assert all(map(is_armed, model.parameters()))
        found += [model.weight.nbytes, type(model.weight).__name__]
        found.append(eq(type(model.weight), Registered))
    return [*found, *CLASSES_TOLD, *seen([p.detach() for p in model.parameters()])]


@on_ranks(2)
def test_training_with_subclasses_equals_a_plain_program() -> None:
    for first in (False, True):
        check_same(trained(first, False), trained(first, True))
    check_same(registered(False), registered(True))
