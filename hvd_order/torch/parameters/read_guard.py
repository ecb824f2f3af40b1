"""Finishes pending work on a tensor before anything reads it.

While the update of a parameter is deferred, its class is :data:`PendingParameter`; while its
gradient is in flight, the class of the gradient tensor is :class:`InFlightGradient`. Both have the
layout of the class they replace, so the swap is one assignment (torch does the same with its own
``UninitializedParameter``). Before torch uses a tensor of another class than its own two, it asks
the tensor for ``__torch_function__``: in every operator, method, ``.data``, ``copy``, ``pickle``.

A pending parameter is finished when it is asked, and answers that it has no such function. So it
does not matter which module reads a parameter, or whether a module does at all; and a tensor of
another subclass beside it, or a mode, meets an ordinary parameter, up to date. unasked.py lists the
places that do not ask. Reads of metadata (shape, dtype) finish nothing, nor does ``.grad``, except
where only the other ranks determine whether it is None: for these the class has members of its own
(metadata.py), so nobody asks.

On a device an update has not run yet when it has been launched. Until it has, the parameter stays
armed, since readers on other streams must wait for it.

A few uses of a gradient in flight need not wait for it (in_flight.py): clipping and unscaling. So
a gradient has a ``__torch_function__``, which finishes it for all others, and calls the function
again.

In addition, a lock protects the parameter's memory (``lock_parameter``): a reader in C++,
invisible to Python, gets an error that names the parameter, never an old value. To avoid this
error in ordinary programs, an update is deferred only if nothing else reaches the parameter's
memory (deferred_updates.py) but plain tensors in dicts and lists of the program, which are guarded
as the parameter is (kept_tensors.py), and if its readers are known: observed from Python in an
earlier step (consumption.py), inside of a module at whose entry it is finished (hidden_readers.py),
or inside of a compiled region (compiled_regions.py).
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch.nn import Parameter

from hvd_order._native import _torch as native
from hvd_order.base.errors import InvalidUsage
from hvd_order.torch.parameters import gradient_alias, graph_capture, in_flight, metadata, unasked
from hvd_order.torch.parameters.gradient_alias import gradient_of
from hvd_order.torch.parameters.in_flight import CompletingGuard, Stay

__all__: list[str] = []

GUARD = "_hvd_order_guard"


class Guard(Stay, Protocol):
    """Finishes tensors before they are read."""

    def before_parameter_read(self, parameters: list[torch.Tensor]) -> None:
        """Brings the parameters up to date and disarms them."""

    def in_profile(self, parameters: list[torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
        """What a profiler sees of `before_parameter_read`: waits first, then the context."""

    def before_grad_attribute(self, parameter: torch.Tensor) -> None:
        """Handles a coming read or write of ``parameter.grad`` of a pending parameter."""

    def before_gradient_read(self, gradients: list[torch.Tensor]) -> None:
        """Completes the exchange of the gradients and disarms them."""


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
    for each in tensors:
        tensor = gradient_of(each)
        guard = vars(tensor).get(GUARD)
        if isinstance(guard, weakref.ref):
            guard = guard()
            if guard is None:
                raise InvalidUsage(
                    "a gradient is read that was on its way when its DistributedOptimizer was "
                    "dropped; keep the optimizer until step()"
                )
        # The gradient, finished just before, also completed the update of this parameter, or
        # another thread has done it.
        if guard is None:
            continue
        guards.setdefault(id(guard), (guard, []))[1].append(tensor)
    return guards.values()


def _common_guard(tensors: list[torch.Tensor]) -> Guard | None:
    """The guard of all tensors; None unless each is a gradient in flight, of the same guard."""
    if not all(type(tensor) is InFlightGradient for tensor in tensors):
        return None
    if len(tensors) == 1:  # without _by_guard, since clipping does this for each gradient
        guard = vars(tensors[0]).get(GUARD)  # None: another thread has just completed it
        alive: Guard | None = guard() if isinstance(guard, weakref.ref) else guard
        return alive
    by_guard = list(_by_guard(tensors))
    return by_guard[0][0] if len(by_guard) == 1 and len(by_guard[0][1]) == len(tensors) else None


# A compiled graph breaks at a pending parameter; its result is right.
@graph_capture.outside
def settle(*values: object) -> None:
    """Finishes every guarded tensor in ``values``, at any depth of lists, tuples and dicts."""
    parameters: list[torch.Tensor] = []
    gradients: list[torch.Tensor] = []
    for value in values:
        _collect(value, parameters, gradients)
    if not (parameters or gradients):
        return
    # The reader's context (a trace, a transform, a mode) must not see this work; a profiler is to
    # know how long it takes.
    with contextlib.ExitStack() as context:
        if torch._C._autograd._profiler_enabled():
            for guard, tensors in _by_guard(parameters):
                context.enter_context(guard.in_profile(tensors))
        context.enter_context(native.CleanRoom())
        for guard, tensors in _by_guard(gradients):
            guard.before_gradient_read(tensors)
        for guard, tensors in _by_guard(parameters):
            guard.before_parameter_read(tensors)
    for gradient in gradients:
        gradient_alias.end(gradient)


def _finish(value: object) -> None:
    """Finishes the parameters and gradients in a value."""
    _make_ordinary(value)
    gradients: list[torch.Tensor] = []
    _collect(value, [], gradients)
    settle(gradients)


def _make_ordinary(value: object) -> None:
    """Finishes pending parameters; they are ordinary also where a device has yet to update them."""
    parameters: list[torch.Tensor] = []
    _collect(value, parameters, [])
    if parameters:
        for parameter in parameters:
            vars(parameter).pop(_FAILURE, None)  # this call raises it
        settle(parameters)
        for parameter in parameters:
            disarm_parameter(parameter)


def _ordinary(tensor: Any) -> Any:
    """Finishes a tensor, and makes it ordinary, also where a device has yet to run its update.

    Returns:
        The tensor; for a complete gradient that stays armed, another one with the same memory.
    """
    settle(tensor)
    disarm_parameter(tensor)
    if type(tensor) is InFlightGradient:
        with torch._C.DisableTorchFunctionSubclass():
            return torch.Tensor.as_subclass(tensor, torch.Tensor)
    return tensor


class _GuardedTensor:
    """Completes a tensor before it is read; it is an ordinary one afterwards."""

    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copies the completed tensor, as an ordinary one."""
        return copy.deepcopy(_ordinary(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles the completed tensor, as an ordinary one."""
        return _ordinary(self).__reduce_ex__(protocol)

    def __repr__(self) -> str:
        """Shows the completed tensor."""
        return repr(_ordinary(self))


# ---- parameters --------------------------------------------------------------------------------


class _RaisingTorchFunction:
    """The ``__torch_function__`` of a parameter that could not be finished: raises the reason.

    torch ignores an error from where it asks for the function.
    """

    def __init__(self, parameter: Any, error: BaseException) -> None:
        self._parameter = weakref.ref(parameter)
        self._error = error

    def __call__(self, *_args: Any) -> Any:
        parameter = self._parameter()
        if parameter is not None:
            vars(parameter).pop(_FAILURE, None)
        raise self._error


_FAILURE = "_hvd_order_failure"
_NO_FUNCTION = torch._C._disabled_torch_function_impl


class _FinishedWhenAsked:
    """The attribute ``__torch_function__``: finishes the parameter that is asked for it."""

    def __get__(self, parameter: Any, _class: Any = None) -> Any:
        if parameter is None:  # what the class has: nobody is asked
            return _NO_FUNCTION
        failure = vars(parameter).get(_FAILURE)  # torch asks again when it calls
        if failure is None:
            try:
                settle(parameter)
            except BaseException as error:
                failure = vars(parameter)[_FAILURE] = _RaisingTorchFunction(parameter, error)
        return _NO_FUNCTION if failure is None else failure


@graph_capture.outside
def _before_grad_attribute(tensor: torch.Tensor) -> None:
    guard: Guard | None = vars(tensor).get(GUARD)
    if guard is not None:  # else another thread has just updated the parameter
        guard.before_grad_attribute(tensor)


class _Pending(_GuardedTensor):
    """Marks the classes of pending parameters beside the user's classes."""

    __slots__ = ()
    __torch_function__ = _FinishedWhenAsked()

    vars().update(metadata.members(settle, _before_grad_attribute))

    def __init_subclass__(cls) -> None:
        """Keeps the class from the user's ``__init_subclass__``: it is none of the program's."""


class _AsUsers(type):
    """The metaclass of pending classes: programs that compare ``type(p)`` find the user's class."""

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.__bases__[1]  # beside _Pending

    def __hash__(cls) -> int:
        return hash(cls.__bases__[1])

    def __init_subclass__(cls) -> None:
        """Keeps the class from the user's metaclass, as `_Pending` does."""


def _made_pending(user_class: type) -> type | None:
    user_meta: Any = type(user_class)
    # No code of the user's metaclass runs, as none of __init_subclass__ does.
    try:
        meta: Any = type.__new__(type(user_meta), user_meta.__name__, (_AsUsers, user_meta), {})
        made: type = type.__new__(meta, user_class.__name__, (_Pending, user_class), {
            "__slots__": (), "__module__": user_class.__module__,
            "__qualname__": user_class.__qualname__, **metadata.own_members(user_class),
        })  # fmt: skip
    except TypeError:  # the class cannot be inherited, or the metaclass lets only itself do it
        return None
    return made


# The class of a parameter whose update is deferred.
PendingParameter: Any = _made_pending(Parameter)

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
            and user_class.__setattr__ is plain.__setattr__
            and user_class.__delattr__ is plain.__delattr__
        )
        _PENDING[user_class] = _made_pending(user_class) if is_plain else None
    return _PENDING[user_class]


# The class of a tensor of the program that has the memory of such a parameter, or of its state.
PendingTensor: Any = _made_pending(torch.Tensor)


# ---- gradients ---------------------------------------------------------------------------------


@graph_capture.outside
def _in_flight(func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any] | None:
    with native.CleanRoom(), torch._C.DisableTorchFunctionSubclass():
        return in_flight.call(func, args, kwargs, _common_guard)


# Answers of `_before_call`; a tuple has the result.
_CALL_AGAIN = None
_CALL_ASIDE = False  # without asking the classes of tensors


def _before_call(
    func: Callable[..., Any], types: tuple[type, ...], args: Any, kwargs: Any
) -> tuple[Any] | bool | None:
    # Beside a tensor of another subclass, the function is that class's.
    if func in in_flight.FUNCTIONS and len(types) == 1:
        answer: tuple[Any] | None = in_flight.short_call(func, args, kwargs)
        if answer is None:
            answer = _in_flight(func, args, kwargs)
        if answer is not None:
            return answer
    if func in metadata.FUNCTIONS:
        return _CALL_ASIDE
    settle(args, kwargs)
    armed: list[torch.Tensor] = []
    _collect((args, kwargs), [], armed)
    if not armed:
        return _CALL_AGAIN
    return _CALL_ASIDE if len(types) == 1 else (_call_beside(func, armed, args, kwargs),)


def _call_beside(
    func: Callable[..., Any], armed: list[torch.Tensor], args: Any, kwargs: Any
) -> Any:
    """Calls a function of complete gradients that stay armed, and tensors of other subclasses."""
    guards = [vars(gradient).get(GUARD) for gradient in armed]
    for gradient in armed:
        gradient.__class__ = torch.Tensor
    try:
        return func(*args, **kwargs)
    finally:
        for gradient, guard in zip(armed, guards, strict=True):
            if guard is not None and vars(gradient).get(GUARD) is guard:
                gradient.__class__ = InFlightGradient


class InFlightGradient(_GuardedTensor, torch.Tensor):  # type: ignore[misc]
    """A gradient that is being summed over the ranks."""

    __slots__ = ()

    __torch_function__ = classmethod(native.torch_function(_before_call))

    # torch asks no class before these two.
    def as_subclass(self, cls: Any) -> Any:
        """Finishes the gradient first."""
        return torch.Tensor.as_subclass(_ordinary(self), cls)

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Finishes the gradient first."""
        settle(self)
        return torch.Tensor.set_(self, *args, **kwargs)


# ---- arming ------------------------------------------------------------------------------------


def arm_parameter(parameter: torch.Tensor, guard: Guard) -> bool:
    """Makes the next read of ``parameter`` call ``guard``.

    Returns:
        Whether that is possible: a subclass of ``Parameter`` may have a guard of its own kind.
    """
    if is_armed(parameter):
        vars(parameter)[GUARD] = guard
        return True
    user_class = type(parameter)
    pending = _pending_class(user_class)
    if pending is None:
        return False
    # Before the class: a reader on another thread finds both.
    vars(parameter)[GUARD] = guard
    try:
        parameter.__class__ = pending
    except TypeError:  # the subclass has __slots__ of its own
        _PENDING[user_class] = None
        del vars(parameter)[GUARD]
        return False
    return True


class _OfParameter(CompletingGuard):
    """The guard of a tensor that is up to date when a parameter is."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameter = parameter

    def before_parameter_read(self, tensors: list[torch.Tensor]) -> None:
        """Finishes the parameter; the tensors stay armed as long as it does."""
        settle(self._parameter)
        if not is_armed(self._parameter):
            for tensor in tensors:
                disarm_parameter(tensor)

    def before_grad_attribute(self, tensor: torch.Tensor) -> None:
        """The parameter's gradient is none of the tensor's."""

    def before_gradient_read(self, gradients: list[torch.Tensor]) -> None:
        """Not the guard of any gradient."""


def arm_tensor(tensor: torch.Tensor, parameter: torch.Tensor) -> None:
    """Makes the next read of a plain tensor finish ``parameter``, which is armed."""
    vars(tensor)[GUARD] = _OfParameter(parameter)
    tensor.__class__ = PendingTensor


def disarm_parameter(parameter: torch.Tensor) -> None:
    """Makes an armed parameter or tensor an ordinary one again. Has no effect on others."""
    kind = type(parameter)  # once: readers on other threads may disarm it, too
    if issubclass(kind, _Pending):
        parameter.__class__ = kind.__bases__[1]  # beside _Pending
        attributes = vars(parameter)
        attributes.pop(GUARD, None)
        attributes.pop(_FAILURE, None)


def is_armed(parameter: torch.Tensor) -> bool:
    """Whether the next read of ``parameter`` calls a guard."""
    return isinstance(parameter, _Pending)


def arm_gradient(gradient: torch.Tensor, guard: Guard) -> None:
    """Makes the next read of ``gradient`` call ``guard``.

    C++ holds the gradient invisibly to the garbage collector, so the gradient must not keep the
    guard, and the objects that the guard holds, alive.
    """
    if type(gradient) is torch.Tensor:
        vars(gradient)[GUARD] = weakref.ref(guard)
        gradient.__class__ = InFlightGradient


def disarm_gradient(gradient: torch.Tensor) -> None:
    """Makes the gradient an ordinary tensor again. Has no effect on an ordinary tensor."""
    if type(gradient) is InFlightGradient:
        gradient.__class__ = torch.Tensor  # type: ignore[assignment]
        attributes = vars(gradient)
        attributes.pop(GUARD, None)
        attributes.pop(in_flight.NORM_WINDOW, None)


def set_guard(tensor: torch.Tensor, guard: Guard) -> None:
    """Makes the next read of a guarded tensor call another guard. Ignores other tensors."""
    if isinstance(tensor, (_Pending, InFlightGradient)):
        vars(tensor)[GUARD] = guard


unasked.ask(_finish, _make_ordinary)
