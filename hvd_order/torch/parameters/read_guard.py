"""Finishes pending work on a tensor before anything reads it.

While the update of a parameter is deferred, its class is :class:`PendingParameter`; while its
gradient is in flight, the class of the gradient tensor is :class:`InFlightGradient`. Both have the
layout of the class they replace, so the swap is one assignment (torch does the same with its own
``UninitializedParameter``). Every use from Python -- an operator, a method, ``.data``, ``copy``,
``pickle`` -- goes through ``__torch_function__``, which first calls the guard to finish and then
runs the requested function. So it does not matter which module reads a parameter, or whether a
module does at all: the first reader finds an ordinary parameter, up to date.

Reads of metadata (shape, dtype) finish nothing, nor does ``.grad``, except where only the other
ranks determine whether it is None.

On a device an update has not run yet when it has been launched. Until it has, the parameter stays
armed, since readers on other streams must wait for it.

A few uses of a gradient in flight need not wait for it (in_flight.py): clipping and unscaling.

In addition, a lock protects the parameter's memory (:class:`StorageLock`): a reader in C++,
invisible to Python, gets an error that names the parameter, never an old value. To avoid this
error in ordinary programs, an update is deferred only if nothing else reaches the parameter's
memory (deferred_updates.py), and if its readers are known: observed from Python in an earlier step
(consumption.py), inside of a module at whose entry it is finished (hidden_readers.py), or inside
of a compiled region (compiled_regions.py).
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch.nn import Parameter

from hvd_order import _torch as native
from hvd_order.errors import InvalidUsage
from hvd_order.torch.parameters import in_flight
from hvd_order.torch.parameters.in_flight import Change

__all__: list[str] = []

GUARD = "_hvd_order_guard"


class Guard(Protocol):
    """Finishes tensors before they are read."""

    def before_parameter_read(self, parameters: list[torch.Tensor]) -> None:
        """Brings the parameters up to date and disarms them."""

    def before_grad_attribute(self, parameter: torch.Tensor) -> None:
        """Handles a coming read or write of ``parameter.grad`` of a pending parameter."""

    def before_gradient_read(self, gradients: list[torch.Tensor]) -> None:
        """Completes the exchange of the gradients and disarms them."""

    def norms(self, gradients: list[torch.Tensor], order: float) -> list[torch.Tensor] | None:
        """Returns the norms of the gradients, 0-d and of their dtypes, and leaves them in flight;
        None: they must be completed first.

        Args:
            order: 2 or infinity.
        """

    def change(self, gradients: list[torch.Tensor], change: Change) -> bool:
        """Makes a change to the gradients once they are complete; returns whether it will."""

    def may_stay_in_flight(self, gradients: list[torch.Tensor]) -> bool:
        """Whether `change` would make a change."""


def _getter(name: str) -> Any:
    return getattr(torch.Tensor, name).__get__


def _setter(name: str) -> Any:
    return getattr(torch.Tensor, name).__set__


# Functions that inspect a tensor without reading its elements. All other functions finish the
# tensor first, so a name missing here costs only overlap.
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
    if issubclass(kind, _Pending):
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
        guard = getattr(tensor, GUARD, None)
        if isinstance(guard, weakref.ref):
            guard = guard()
            if guard is None:
                raise InvalidUsage(
                    "a gradient is read that was on its way when its DistributedOptimizer was "
                    "dropped; keep the optimizer until step()"
                )
        # The gradient, finished just before, also completed the update of this parameter.
        if guard is None:
            continue
        guards.setdefault(id(guard), (guard, []))[1].append(tensor)
    return guards.values()


def _common_guard(tensors: list[torch.Tensor]) -> Guard | None:
    """The guard of all tensors; None unless each is a gradient in flight, of the same guard."""
    if not all(type(tensor) is InFlightGradient for tensor in tensors):
        return None
    if len(tensors) == 1:
        guard = getattr(tensors[0], GUARD)
        alive: Guard | None = guard() if isinstance(guard, weakref.ref) else guard
        return alive
    by_guard = list(_by_guard(tensors))
    return by_guard[0][0] if len(by_guard) == 1 and len(by_guard[0][1]) == len(tensors) else None


# A compiled graph breaks at a pending parameter; its result is right.
@torch._dynamo.disable  # type: ignore[untyped-decorator]
def settle(*values: object) -> None:
    """Finishes every guarded tensor in ``values``, at any depth of lists, tuples and dicts."""
    parameters: list[torch.Tensor] = []
    gradients: list[torch.Tensor] = []
    for value in values:
        _collect(value, parameters, gradients)
    if not (parameters or gradients):
        return
    # The reader's context (a trace, a transform, a mode) must not see this work.
    with native.CleanRoom():
        for guard, tensors in _by_guard(gradients):
            guard.before_gradient_read(tensors)
        for guard, tensors in _by_guard(parameters):
            guard.before_parameter_read(tensors)


def _ordinary(tensor: Any) -> Any:
    """Finishes a tensor, and makes it ordinary, also where a device has yet to run its update.

    Returns:
        The tensor; for a complete gradient that stays armed, another one with the same memory.
    """
    settle(tensor)
    disarm_parameter(tensor)
    if type(tensor) is InFlightGradient:
        with torch._C.DisableTorchFunctionSubclass():
            return tensor.as_subclass(torch.Tensor)
    return tensor


@torch._dynamo.disable  # type: ignore[untyped-decorator]
def _before_grad_attribute(tensor: torch.Tensor) -> None:
    guard: Guard = getattr(tensor, GUARD)
    guard.before_grad_attribute(tensor)


@torch._dynamo.disable  # type: ignore[untyped-decorator]
def _in_flight(func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any] | None:
    with native.CleanRoom(), torch._C.DisableTorchFunctionSubclass():
        return in_flight.call(func, args, kwargs, _common_guard)


def _before_call(func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any] | None:
    if func in in_flight.FUNCTIONS:
        answer: tuple[Any] | None = in_flight.short_call(func, args, kwargs)
        if answer is None:
            answer = _in_flight(func, args, kwargs)
        if answer is not None:
            return answer
    if func not in _METADATA:
        settle(args, kwargs)
    elif func in _GRAD_ATTRIBUTE and isinstance(args[0], _Pending):
        _before_grad_attribute(args[0])
    return None


_settled_call = native.torch_function(_before_call)


class _Guarded:
    """Completes a tensor before it is read; it is an ordinary one afterwards."""

    __slots__ = ()

    __torch_function__ = classmethod(_settled_call)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copies the completed tensor, as an ordinary one."""
        return copy.deepcopy(_ordinary(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles the completed tensor, as an ordinary one."""
        return _ordinary(self).__reduce_ex__(protocol)

    def __repr__(self) -> str:
        """Shows the completed tensor."""
        return repr(_ordinary(self))


class _Pending(_Guarded):
    """Marks the classes of pending parameters beside the user's classes."""

    __slots__ = ()


class PendingParameter(_Pending, Parameter):  # type: ignore[misc]
    """A parameter whose update is deferred."""

    __slots__ = ()


# By the user's class. Subclasses of Parameter (such as a weight with quantization attributes) get
# a pending class at first use; None: the class has a guard of its own kind.
_PENDING: dict[type, type | None] = {Parameter: PendingParameter}


def _pending_class(user_class: type) -> type | None:
    if user_class not in _PENDING:
        plain: Any = Parameter
        is_plain = (
            issubclass(user_class, Parameter)
            and not issubclass(user_class, _Pending)
            # Compared as bound methods: the same function for the same class.
            and user_class.__torch_function__ == plain.__torch_function__
            and user_class.__torch_dispatch__ == plain.__torch_dispatch__
            and user_class.__getattribute__ is plain.__getattribute__
        )
        _PENDING[user_class] = (
            type(f"Pending{user_class.__name__}", (_Pending, user_class), {"__slots__": ()})
            if is_plain
            else None
        )
    return _PENDING[user_class]


class InFlightGradient(_Guarded, torch.Tensor):  # type: ignore[misc]
    """A gradient that is being summed over the ranks."""

    __slots__ = ()


def arm_parameter(parameter: torch.Tensor, guard: Guard) -> bool:
    """Makes the next read of ``parameter`` call ``guard``.

    Returns:
        Whether that is possible: a subclass of ``Parameter`` may have a guard of its own kind.
    """
    if is_armed(parameter):
        setattr(parameter, GUARD, guard)
        return True
    pending = _pending_class(type(parameter))
    if pending is None:
        return False
    try:
        parameter.__class__ = pending
    except TypeError:  # the subclass has __slots__ of its own
        _PENDING[type(parameter)] = None
        return False
    setattr(parameter, GUARD, guard)
    return True


def disarm_parameter(parameter: torch.Tensor) -> None:
    """Makes the parameter an ordinary one again. Has no effect on an ordinary parameter."""
    if is_armed(parameter):
        parameter.__class__ = type(parameter).__bases__[1]  # beside _Pending
        delattr(parameter, GUARD)


def is_armed(parameter: torch.Tensor) -> bool:
    """Whether the next read of ``parameter`` calls a guard."""
    return isinstance(parameter, _Pending)


def arm_gradient(gradient: torch.Tensor, guard: Guard) -> None:
    """Makes the next read of ``gradient`` call ``guard``.

    C++ holds the gradient invisibly to the garbage collector, so the gradient must not keep the
    guard, and the objects that the guard holds, alive.
    """
    if type(gradient) is torch.Tensor:
        setattr(gradient, GUARD, weakref.ref(guard))
        gradient.__class__ = InFlightGradient


def disarm_gradient(gradient: torch.Tensor) -> None:
    """Makes the gradient an ordinary tensor again. Has no effect on an ordinary tensor."""
    if type(gradient) is InFlightGradient:
        gradient.__class__ = torch.Tensor  # type: ignore[assignment]
        delattr(gradient, GUARD)
        vars(gradient).pop(in_flight.OPEN, None)


def hand_to(tensor: torch.Tensor, guard: Guard) -> None:
    """Makes the next read of a guarded tensor call another guard. Ignores other tensors."""
    if isinstance(tensor, (_Pending, InFlightGradient)):
        setattr(tensor, GUARD, guard)
