"""Finishes what is outstanding on a tensor before anything reads it.

While the update of a parameter is outstanding, its class is :class:`PendingParameter`; while its
gradient travels, the class of the gradient tensor is :class:`InFlightGradient`. Both have the
layout of the class they stand in for, so the swap is one assignment (torch does the same with its
own ``UninitializedParameter``). Every use from Python -- an operator, a method, ``.data``,
``copy``, ``pickle`` -- goes through ``__torch_function__``, which asks the guard to finish first
and then runs what was asked for. So it does not matter which module reads a parameter, or whether
a module does at all: the first reader finds it up to date, and finds it as an ordinary parameter.

Reads that only look at metadata (shape, dtype) finish nothing, nor does ``.grad``, except where
only the other ranks know whether it is None.

What Python cannot see: readers in C++ (TorchScript, captured CUDA graphs, compiled graphs).
Parameters that nobody was seen reading from Python are never left outstanding (consumption.py),
compiled regions finish at their entry (compiled_regions.py), and a gradient that arrives for a
parameter whose update is outstanding raises ``StaleRead`` (exchange.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch.nn import Parameter

__all__: list[str] = []

GUARD = "_hvd_order_guard"


class Guard(Protocol):
    """Who knows how to finish a tensor."""

    def before_parameter_read(self, parameters: list[torch.Tensor]) -> None:
        """Brings the parameters up to date and disarms them."""

    def before_grad_attribute(self, parameter: torch.Tensor) -> None:
        """``parameter.grad`` of a pending parameter is about to be looked at or set."""

    def before_gradient_read(self, gradients: list[torch.Tensor]) -> None:
        """Completes the exchange of the gradients and disarms them."""


def _getter(name: str) -> Any:
    return getattr(torch.Tensor, name).__get__


def _setter(name: str) -> Any:
    return getattr(torch.Tensor, name).__set__


# Functions that look at a tensor without reading its elements. Anything not listed finishes
# first, so a name missing here costs overlap and nothing else.
_METADATA: frozenset[Any] = frozenset(
    [_getter(name) for name in (
        "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad", "grad_fn",
        "is_sparse", "is_cuda", "is_cpu", "is_meta", "is_mkldnn", "is_quantized", "is_nested",
        "is_xpu", "is_mps", "itemsize", "nbytes", "retains_grad", "name", "output_nr",
    )]
    + [_setter(name) for name in ("grad", "requires_grad")]
    + [
        torch.Tensor.size, torch.Tensor.dim, torch.Tensor.ndimension, torch.Tensor.numel,
        torch.Tensor.nelement, torch.Tensor.stride, torch.Tensor.storage_offset,
        torch.Tensor.element_size, torch.Tensor.is_contiguous, torch.Tensor.is_floating_point,
        torch.Tensor.is_complex, torch.Tensor.get_device, torch.Tensor.requires_grad_,
        torch.Tensor.__hash__, torch.Tensor.__len__, torch.Tensor.register_hook,
        torch.Tensor.register_post_accumulate_grad_hook, torch.is_floating_point, torch.is_complex,
        torch.numel,
    ]
)  # fmt: skip


_GRAD_ATTRIBUTE: frozenset[Any] = frozenset([_getter("grad"), _setter("grad")])


def _collect(value: object, parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
    kind = type(value)
    if kind is PendingParameter:
        parameters.append(value)  # type: ignore[arg-type]
    elif kind is InFlightGradient:
        gradients.append(value)  # type: ignore[arg-type]
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, parameters, gradients)
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, parameters, gradients)


def _by_guard(tensors: list[torch.Tensor]) -> Iterable[tuple[Guard, list[torch.Tensor]]]:
    guards: dict[int, tuple[Guard, list[torch.Tensor]]] = {}
    for tensor in tensors:
        guard: Guard = getattr(tensor, GUARD)
        guards.setdefault(id(guard), (guard, []))[1].append(tensor)
    return guards.values()


# A compiled graph that meets a pending parameter breaks here, and is right.
@torch._dynamo.disable  # type: ignore[untyped-decorator]
def settle(*values: object) -> None:
    """Finishes every guarded tensor in ``values``, at any depth of lists, tuples and dicts."""
    parameters: list[torch.Tensor] = []
    gradients: list[torch.Tensor] = []
    for value in values:
        _collect(value, parameters, gradients)
    if not (parameters or gradients):
        return
    # Inside of a transform (vmap, grad) the update is no part of what is transformed.
    with torch._C._DisableFuncTorch():
        for guard, tensors in _by_guard(gradients):
            guard.before_gradient_read(tensors)
        for guard, tensors in _by_guard(parameters):
            guard.before_parameter_read(tensors)


@torch._dynamo.disable  # type: ignore[untyped-decorator]
def _before_grad_attribute(tensor: torch.Tensor) -> None:
    guard: Guard = getattr(tensor, GUARD)
    guard.before_grad_attribute(tensor)


def _settled_call(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    if func not in _METADATA:
        settle(args, kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


class PendingParameter(Parameter):
    """A parameter whose update is outstanding."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Finishes the update, then runs ``func``."""
        if func in _GRAD_ATTRIBUTE and type(args[0]) is PendingParameter:
            _before_grad_attribute(args[0])
        return _settled_call(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copies the parameter as it is after its update, as an ordinary one."""
        settle(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles the parameter as it is after its update, as an ordinary one."""
        settle(self)
        return self.__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override]
        """Shows the parameter as it is after its update."""
        settle(self)
        return repr(self)


class InFlightGradient(torch.Tensor):
    """A gradient that is being summed over the ranks."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Completes the exchange, then runs ``func``."""
        return _settled_call(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copies the summed gradient, as an ordinary tensor."""
        settle(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles the summed gradient, as an ordinary tensor."""
        settle(self)
        return self.__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override]
        """Shows the summed gradient."""
        settle(self)
        return repr(self)


def arm_parameter(parameter: torch.Tensor, guard: Guard) -> bool:
    """Makes the next read of ``parameter`` call ``guard``.

    Returns:
        Whether that is possible: a subclass of ``Parameter`` may have a guard of its own kind.
    """
    if type(parameter) is not Parameter:
        return type(parameter) is PendingParameter
    setattr(parameter, GUARD, guard)
    parameter.__class__ = PendingParameter
    return True


def disarm_parameter(parameter: torch.Tensor) -> None:
    """Makes the parameter an ordinary one again. Harmless on one that is."""
    if type(parameter) is PendingParameter:
        parameter.__class__ = Parameter  # type: ignore[assignment]
        delattr(parameter, GUARD)


def arm_gradient(gradient: torch.Tensor, guard: Guard) -> None:
    """Makes the next read of ``gradient`` call ``guard``."""
    if type(gradient) is torch.Tensor:
        setattr(gradient, GUARD, guard)
        gradient.__class__ = InFlightGradient


def disarm_gradient(gradient: torch.Tensor) -> None:
    """Makes the gradient an ordinary tensor again. Harmless on one that is."""
    if type(gradient) is InFlightGradient:
        gradient.__class__ = torch.Tensor  # type: ignore[assignment]
        delattr(gradient, GUARD)
