"""Actions with tensors of other classes, beside parameters and gradients and made of them."""

from __future__ import annotations

from typing import Any

import torch
from random_programs.models import MODELS
from random_programs.reads import evaluated
from random_programs.registry import Place, action
from random_programs.training import with_loss
from random_programs.world import World, loss_of
from torch import Tensor, nn

_PLAIN = ("perceptron", "flat", "blocks", "normed", "tied", "functional", "weight_norm")


def takes_subclasses(world: World) -> bool:
    """Whether the model is made of operators that keep the class of their inputs."""
    assert set(_PLAIN) <= set(MODELS)
    return world.setup.model in _PLAIN


class Labelled(torch.Tensor):
    """Carries a label from operand to result, as MONAI's MetaTensor."""

    label: str = "none"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        labels = [arg.label for arg in args if isinstance(arg, Labelled)]
        if isinstance(result, Labelled) and labels:
            result.label = labels[0]
        return result


class Doubling(torch.Tensor):
    """Doubles every product."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        products = (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.matmul)
        return result * 2 if func in (*products, nn.functional.linear) else result


class Noting(torch.Tensor):
    """Notes what it is asked, and by which classes."""

    calls: list[tuple[str, list[str]]] = []  # noqa: RUF012  (one list for all is meant)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        cls.calls.append((name, sorted(t.__name__ for t in types)))
        return super().__torch_function__(func, types, args, kwargs or {})


class Refusing(torch.Tensor):
    """Knows only itself: other classes of tensors are not its business."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not all(issubclass(t, (Refusing, nn.Parameter)) for t in types):
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Wrapping:
    """No tensor, but torch asks it (``__torch_function__``) all the same."""

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        unwrapped = [arg.inner if isinstance(arg, Wrapping) else arg for arg in args]
        return cls(func(*unwrapped, **(kwargs or {})))


class Rows(torch.Tensor):
    """A wrapper with ``__torch_dispatch__``, which holds another tensor."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Rows:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def bare(value: Any) -> Any:
            return value.inner if isinstance(value, Rows) else value

        result = func(*torch.utils._pytree.tree_map(bare, args), **(kwargs or {}))
        return Rows(result) if isinstance(result, Tensor) else result


def number_of(value: float, kind: type[Tensor]) -> Any:
    return torch.tensor(value, dtype=torch.float64).as_subclass(kind)


# ---- as inputs --------------------------------------------------------------------------------


@action(alone=True)
def evaluate_labelled(world: World, number: int) -> None:
    """What comes out has the class and the label of what went in."""
    if not takes_subclasses(world):
        return
    x = world.common_rows().to(world.parameter(0).dtype).as_subclass(Labelled)
    x.label = "rows"
    was_training = world.model.training
    with torch.no_grad():
        result = world.to_evaluation()(x)
    world.model.train(was_training)
    world.see("class", type(result).__name__)
    world.see("label", getattr(result, "label", "lost"))
    world.see("labelled", result.as_subclass(torch.Tensor))


@action(alone=True)
def evaluate_wrapped(world: World, number: int) -> None:
    if world.setup.model in ("perceptron", "blocks") and not world.has_backward_hooks:
        x = world.common_rows().to(world.parameter(0).dtype)
        with torch.no_grad():
            result = world.model(Rows(x))
        world.see("wrapped", (type(result).__name__, result.inner))


@action(Place.BACKWARD, numbers=3)
def backward_of_subclass(world: World, number: int) -> None:
    """Trains on rows of a class of the program's own."""
    kind = (Labelled, Doubling, Refusing)[number]

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        result = loss_of(model, x.as_subclass(kind))  # type: ignore[type-var]
        world.see("class of the loss", type(result).__name__)
        return result.as_subclass(torch.Tensor)

    if takes_subclasses(world) and not world.has_backward_hooks:
        with_loss(world, loss)
    else:
        world.backward()


@action(Place.BACKWARD)
def backward_with_subclass_factors(world: World, number: int) -> None:
    """A penalty that multiplies parameters by tensors of another class."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        total = loss_of(model, x)
        for p in model.parameters():
            product = p * number_of(0.25, Doubling)
            total = total + product.as_subclass(torch.Tensor).square().sum()
        return total

    with_loss(world, loss)


# ---- in operators ------------------------------------------------------------------------------


def combined(tensor: Tensor, number: int) -> Any:
    """The tensor in an operator with another of one of these classes.

    Nothing else looks at the tensor before: it may have to wait, and that is over then.
    """
    one = torch.tensor(1.5, dtype=torch.float64)
    if number == 0:
        return (tensor * one.as_subclass(Doubling)).as_subclass(torch.Tensor)
    if number == 1:
        other = one.as_subclass(Labelled)
        other.label = "factor"
        product = other * tensor
        return type(product).__name__, product.label, product.as_subclass(torch.Tensor)
    if number == 2:
        Noting.calls.clear()
        product = torch.add(tensor, one.as_subclass(Noting)).as_subclass(torch.Tensor)
        return list(Noting.calls), product
    if number == 3:
        return torch.sub(tensor, one.as_subclass(Refusing)).as_subclass(torch.Tensor)
    if number == 4:
        wrapped: Any = torch.mul(tensor, Wrapping(one))  # type: ignore[arg-type]
        return type(wrapped).__name__, wrapped.inner
    product = tensor * Rows(one)
    return type(product).__name__, product.inner  # type: ignore[attr-defined]


@action(alone=True, numbers=6)
def parameter_with_subclass(world: World, number: int) -> None:
    with torch.no_grad():
        for p in world.parameters()[:2]:
            world.see("combined", combined(p, number))


@action(Place.GRADIENTS, alone=True, numbers=6)
def gradient_with_subclass(world: World, number: int) -> None:
    for p in world.parameters()[:2]:
        if p.grad is not None:
            world.see("combined", combined(p.grad, number))


@action(Place.GRADIENTS, numbers=4)
def scale_gradient_by_subclass(world: World, number: int) -> None:
    """In place, by a tensor of another class."""
    gradient = world.parameter(number).grad
    if gradient is not None:
        gradient.mul_(number_of(0.5, Labelled))


@action(numbers=4)
def add_subclass_to_parameter(world: World, number: int) -> None:
    p = world.parameter(number)
    with torch.no_grad():
        p.add_(number_of(0.125, Doubling))


# ---- made of parameters -------------------------------------------------------------------------


def remade(p: nn.Parameter, number: int) -> Tensor:
    """Another tensor over the same memory, made by a constructor."""
    if number == 0:
        return nn.Parameter(p)
    if number == 1:
        return p.as_subclass(torch.Tensor)
    if number == 2:
        return torch.Tensor._make_subclass(torch.Tensor, p)  # type: ignore[attr-defined,no-any-return]
    if number == 3:
        return torch.Tensor._make_subclass(nn.Parameter, p, True)  # type: ignore[attr-defined,no-any-return]
    if number == 4:
        return nn.Parameter(p.detach(), requires_grad=False)
    return p.detach().as_subclass(Labelled)


@action(first=True, alone=True, numbers=6)
def remake(world: World, number: int) -> None:
    for p in world.parameters():
        world.see("remade", remade(p, number).detach().as_subclass(torch.Tensor))


@action(first=True, numbers=6)
def keep_remade(world: World, number: int) -> None:
    """It shares memory with the parameter, so later reads see what was trained."""
    made = [remade(p, number).detach() for p in world.parameters()[:2]]
    world.kept.tensors += [tensor.as_subclass(torch.Tensor) for tensor in made]


@action(alone=True)
def evaluate_remade(world: World, number: int) -> None:
    """A model for evaluation whose parameters are made of the trained ones."""
    if world.setup.model not in ("perceptron", "blocks", "flat"):
        return
    values = {name: nn.Parameter(p) for name, p in world.model.named_parameters()}
    x = world.common_rows().to(world.parameter(0).dtype)
    with torch.no_grad():
        world.see("of remade", torch.func.functional_call(world.model, values, x))
        world.see("evaluation", evaluated(world))
