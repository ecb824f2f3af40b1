"""Uses of a gradient in flight, between ``backward()`` and ``step()``, that leave it in flight.

Clipping and unscaling need the norms of gradients, not their elements; and what they do to the
elements, they do to each by itself. Where all-reduces are split (docs/architecture.md), norms of
order 2 and infinity are known early. Changes are noted, and made when the sum has arrived, before
the update.

What is noted, or handed out, is a value of its own. A factor is copied whenever one is given: code
that no counter sees (``.data``, numpy, C++) may give its tensor another value. A norm is handed out
in a tensor that the program may change.

A rank may read elements where others do not, so a gradient that is complete before ``step()`` still
gets its norm from the same squares: norms must be equal to the last bit on all ranks. Whoever has
read elements may also have changed them, so then the elements decide whether that norm is theirs
(sums/norms.py).
"""

from __future__ import annotations

import contextlib
import math
import numbers
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hvd_order._native import _torch as native
from hvd_order.torch.parameters import gradient_alias
from hvd_order.torch.parameters.gradient_alias import gradient_of, gradients_of

__all__: list[str] = []


class Change(Protocol):
    """A change of each element by itself."""

    def apply(self, gradient: torch.Tensor) -> None:
        """Changes a complete gradient in place."""

    def of_norm(self, norm: torch.Tensor) -> torch.Tensor | None:
        """A norm after the change, from the one before; None: it is not known.

        No wait for a device.
        """


@dataclass(frozen=True)
class Factor:
    """Multiplication by a number, or division.

    Attributes:
        value: a number, or a 0-d tensor that nobody changes.
    """

    value: float | torch.Tensor
    divides: bool = False

    def apply(self, gradient: torch.Tensor) -> None:
        """See `Change`."""
        if self.divides:
            gradient.div_(self.value)
        else:
            gradient.mul_(self.value)

    def of_norm(self, norm: torch.Tensor) -> torch.Tensor | None:
        """See `Change`."""
        size = self.value.abs() if isinstance(self.value, torch.Tensor) else abs(self.value)
        on_device = isinstance(size, torch.Tensor) and size.device.type != "cpu"
        if not on_device and not (math.isfinite(size) and (size > 0 or not self.divides)):
            return None  # elements that are 0 become NaN
        return norm / size if self.divides else norm * size


class Unscaling(Factor):
    """Multiplication by the operator of GradScaler, which rounds as ``mul_`` may not."""

    def apply(self, gradient: torch.Tensor) -> None:
        """See `Change`."""
        assert isinstance(self.value, torch.Tensor)
        ignored = torch.zeros(1, dtype=torch.float32, device=gradient.device)
        torch._amp_foreach_non_finite_check_and_unscale_([gradient], ignored, self.value)


@dataclass(frozen=True)
class Clamp:
    """Clamping to a range; None: no limit on that side."""

    low: float | None
    high: float | None

    def apply(self, gradient: torch.Tensor) -> None:
        """See `Change`."""
        gradient.clamp_(self.low, self.high)

    def of_norm(self, norm: torch.Tensor) -> torch.Tensor | None:
        """See `Change`."""
        del norm
        return None


class HasChanges(Protocol):
    """The part of `ParameterEntry` that is used here."""

    changes: list[Change]


class Stay(Protocol):
    """The part of `read_guard.Guard` that leaves gradients in flight."""

    def norms(self, gradients: list[torch.Tensor], order: float) -> list[torch.Tensor] | None:
        """Returns the norms of the gradients, 0-d and of their dtypes, and leaves them in flight;
        None: they must be completed first.

        Args:
            order: 2 or infinity.
        """

    def are_finite(self, gradients: list[torch.Tensor]) -> torch.Tensor | None:
        """Returns whether all elements of the gradients are finite, 0-d and on their device; None:
        they must be completed first.
        """

    def change(self, gradients: list[torch.Tensor], change: Change) -> bool:
        """Makes a change to the gradients once they are complete; returns whether it will."""

    def may_stay_in_flight(self, gradients: list[torch.Tensor]) -> bool:
        """Whether `change` would make a change."""


class CompletingGuard:
    """A `Stay` that has every gradient completed."""

    def in_profile(self, parameters: list[torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
        """See `read_guard.Guard`."""
        del parameters
        return contextlib.nullcontext()

    def norms(self, gradients: list[torch.Tensor], order: float) -> list[torch.Tensor] | None:
        """See `read_guard.Guard`."""
        del gradients, order
        return None

    def are_finite(self, gradients: list[torch.Tensor]) -> torch.Tensor | None:
        """See `read_guard.Guard`."""
        del gradients
        return None

    def change(self, gradients: list[torch.Tensor], change: Change) -> bool:
        """See `read_guard.Guard`."""
        del gradients, change
        return False

    def may_stay_in_flight(self, gradients: list[torch.Tensor]) -> bool:
        """See `read_guard.Guard`."""
        del gradients
        return False


_Tensors = list[torch.Tensor]
# The guard of all of these gradients or aliases, if each is in flight; and the gradients.
_GuardOf = Callable[[_Tensors], tuple[Stay, _Tensors] | None]
_Answer = tuple[Any] | None  # None: the gradients must be completed, then the function is called


def call(
    func: Callable[..., Any], args: Any, kwargs: Any, guard_of: Callable[[_Tensors], Stay | None]
) -> _Answer:
    """Calls one of the `FUNCTIONS` without completing the gradients in flight among its arguments.

    Args:
        guard_of: the guard of all of the given tensors, if each is a gradient in flight.

    Returns:
        The result; None if they must be completed first.
    """

    def find(tensors: _Tensors) -> tuple[Stay, _Tensors] | None:
        gradients = gradients_of(tensors)
        guard = guard_of(gradients) if gradients else None
        return None if guard is None or gradients is None else (guard, gradients)

    return FUNCTIONS[func](find, *args, **kwargs) if args else None


def _as_list(tensors: Any) -> list[torch.Tensor]:
    return list(tensors) if isinstance(tensors, (list, tuple)) else []


# ---- the short way ----------------------------------------------------------------------------

# Attribute of a gradient: (NormWindow, weak reference to its entry, order of a norm, a list with a
# copy of this norm until it is handed out).
NORM_WINDOW = "_hvd_order_norm_window"


class NormWindow:
    """The gradients of one optimizer, from the first use of a norm until elements are read, or
    ``step()``.

    Clipping calls two functions for each gradient while the link waits for ``step()``. So what the
    first calls have checked holds for the others.

    Attributes:
        factor: the last change of any of them, which usually all get.
    """

    __slots__ = ("_is_open", "_lock", "factor")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_open = True
        self.factor: Change | None = None

    def note(self, entry: HasChanges, change: Change) -> bool:
        """Notes a change of a gradient in flight; returns whether it is one still."""
        with self._lock:
            if self._is_open:
                entry.changes.append(change)
            return self._is_open

    def close(self) -> None:
        """No change is noted from now on."""
        with self._lock:
            self._is_open = False

    def __bool__(self) -> bool:
        return self._is_open


def short_call(func: Callable[..., Any], args: Any, kwargs: Any) -> _Answer:
    """Same as `call`, for the two functions of `torch.nn.utils.clip_grad_norm_` on one gradient."""
    if kwargs or len(args) != 2:
        return None
    gradient, value = args
    window, reference, order, copies = getattr(gradient, NORM_WINDOW, _CLOSED)
    entry = reference() if window else None
    if entry is None:
        return None
    if func is torch.linalg.vector_norm:
        is_known = type(value) in (int, float) and value == order and not entry.changes
        return (copies.pop(),) if is_known and copies else None
    if func is torch.Tensor.mul_:
        factor = window.factor
        is_product = type(factor) is Factor and not factor.divides
        if is_product and native.has_value_of(value, factor.value):
            return (gradient,) if window.note(entry, factor) else None
    return None


_CLOSED: tuple[Any, Any, Any, Any] = (None, None, None, None)


# ---- norms ------------------------------------------------------------------------------------


def _norms(guard_of: _GuardOf, gradients: _Tensors, order: Any) -> list[torch.Tensor] | None:
    is_number = isinstance(order, (int, float)) and not isinstance(order, bool)
    if not is_number or order not in (2, math.inf):
        return None
    found = guard_of(gradients)
    return None if found is None else found[0].norms(found[1], float(order))


def _norm_of_one(guard_of: _GuardOf, gradient: Any, order: Any, *more: Any) -> _Answer:
    # Some dimensions, a dtype, a place for the result.
    if any(value is not None and value is not False for value in more):
        return None
    norms = _norms(guard_of, [gradient], order)
    return None if norms is None else (norms[0],)


def _vector_norm(guard_of: _GuardOf, x: Any, /, ord: Any = 2, *more: Any, **named: Any) -> _Answer:
    return _norm_of_one(guard_of, x, ord, *more, *named.values())


def _norm(guard_of: _GuardOf, x: Any, /, p: Any = "fro", *more: Any, **named: Any) -> _Answer:
    order = 2 if isinstance(p, str) and p == "fro" else p
    return _norm_of_one(guard_of, x, order, *more, *named.values())


def _linalg_norm(
    guard_of: _GuardOf, x: Any, /, ord: Any = None, *more: Any, **named: Any
) -> _Answer:
    # With an order it is the norm of a matrix.
    return _norm_of_one(guard_of, x, 2, ord, *more, *named.values())


def _foreach_norm(
    guard_of: _GuardOf, gradients: Any, /, ord: Any = 2, dtype: Any = None
) -> _Answer:
    norms = None if dtype is not None else _norms(guard_of, _as_list(gradients), ord)
    return None if norms is None else (tuple(norms),)


# ---- changes ----------------------------------------------------------------------------------


def _factor(value: Any, divides: bool) -> Factor | None:
    if type(value) is torch.Tensor:  # a class of the program may multiply in another way
        if value.dim() > 0 or value.requires_grad or not value.is_floating_point():
            return None
        return Factor(value.clone(), divides)
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return Factor(float(value), divides) if is_real else None


def _fits(factor: Factor, gradients: _Tensors) -> bool:
    """Whether the operators take the factor: from the CPU, or from the gradient's device."""
    value = factor.value
    if not isinstance(value, torch.Tensor) or value.device.type == "cpu":
        return True
    return all(gradient.device == value.device for gradient in gradients)


def _scale(guard_of: _GuardOf, tensors: _Tensors, other: Any, divides: bool) -> bool:
    found = guard_of(tensors)
    factor = None if found is None else _factor(other, divides)
    if found is None or factor is None or not _fits(factor, tensors):
        return False
    guard, gradients = found
    return guard.change(gradients, factor)


def _scale_one(divides: bool) -> Callable[..., _Answer]:
    def scale(guard_of: _GuardOf, self: Any, /, other: Any, **more: Any) -> _Answer:
        return (self,) if not more and _scale(guard_of, [self], other, divides) else None

    return scale


def _scale_all(divides: bool) -> Callable[..., _Answer]:
    def scale(guard_of: _GuardOf, self: Any, /, other: Any) -> _Answer:
        return (None,) if _scale(guard_of, _as_list(self), other, divides) else None

    return scale


def _limit(guard_of: _GuardOf, tensors: _Tensors, limits: Clamp) -> bool:
    found = guard_of(tensors)
    return found is not None and found[0].change(found[1], limits)


def _clamp(guard_of: _GuardOf, self: Any, /, min: Any = None, max: Any = None) -> _Answer:
    limits = [limit for limit in (min, max) if limit is not None]
    are_numbers = limits and all(isinstance(limit, numbers.Real) for limit in limits)
    return (self,) if are_numbers and _limit(guard_of, [self], Clamp(min, max)) else None


def _clamp_all(is_low: bool) -> Callable[..., _Answer]:
    def clamp(guard_of: _GuardOf, self: Any, /, other: Any) -> _Answer:
        is_number = isinstance(other, numbers.Real)
        limits = Clamp(other, None) if is_low else Clamp(None, other)
        return (None,) if is_number and _limit(guard_of, _as_list(self), limits) else None

    return clamp


def _unscale(guard_of: _GuardOf, self: Any, /, found_inf: Any, inv_scale: Any) -> _Answer:
    """What GradScaler does: tells whether an element is not finite, and multiplies."""
    found = guard_of(_as_list(self))
    factor = None if found is None else _factor(inv_scale, divides=False)
    if found is None or factor is None or type(found_inf) is not torch.Tensor:
        return None
    guard, gradients = found
    if not all(gradient.device == inv_scale.device for gradient in gradients):
        return None
    finite = guard.are_finite(gradients)
    if finite is None or not guard.change(gradients, Unscaling(factor.value)):
        return None
    found_inf.masked_fill_(~finite.to(found_inf.device), 1.0)
    return (None,)


# ---- the tensor itself ------------------------------------------------------------------------


_DATA: Any = torch.Tensor.data


def _alias(made_by: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., _Answer]:
    """``detach()`` and ``.data`` of a gradient."""

    def alias(guard_of: _GuardOf, self: Any, /, *_: Any) -> _Answer:
        found = guard_of([self])
        if found is None or not found[0].may_stay_in_flight(found[1]):
            return None
        return (gradient_alias.alias(self, made_by(self)),)

    return alias


def _set_data(guard_of: _GuardOf, self: Any, /, value: Any) -> _Answer:
    """The end of ``gradient.data *= 2``: the memory is the same."""
    is_alias = isinstance(value, torch.Tensor) and gradient_of(value) is gradient_of(self)
    found = guard_of([self, value]) if is_alias else None
    return None if found is None or not found[0].may_stay_in_flight(found[1]) else (None,)


FUNCTIONS: dict[Any, Callable[..., _Answer]] = {
    torch.linalg.vector_norm: _vector_norm,
    torch.linalg.norm: _linalg_norm,
    torch.norm: _norm,
    torch.Tensor.norm: _norm,
    torch._foreach_norm: _foreach_norm,
    torch.Tensor.mul_: _scale_one(divides=False),
    torch.Tensor.__imul__: _scale_one(divides=False),
    torch._foreach_mul_: _scale_all(divides=False),
    torch.Tensor.div_: _scale_one(divides=True),
    torch.Tensor.__itruediv__: _scale_one(divides=True),
    torch._foreach_div_: _scale_all(divides=True),
    torch.Tensor.clamp_: _clamp,
    torch._foreach_clamp_min_: _clamp_all(is_low=True),
    torch._foreach_clamp_max_: _clamp_all(is_low=False),
    torch._amp_foreach_non_finite_check_and_unscale_: _unscale,
    torch.Tensor.detach: _alias(torch.Tensor.detach),
    _DATA.__get__: _alias(_DATA.__get__),
    _DATA.__set__: _set_data,
}
