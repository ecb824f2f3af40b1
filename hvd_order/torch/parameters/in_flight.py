"""Uses of a gradient in flight, between ``backward()`` and ``step()``, that leave it in flight.

Clipping and unscaling need the norms of gradients, not their elements; and what they do to the
elements, they do to each by itself. Where all-reduces are split (docs/architecture.md), norms of
order 2 and infinity are known early. Changes are noted, and made when the sum has arrived, before
the update.

A rank may read elements where others do not, so a gradient that is complete before ``step()`` still
gets its norm from the same squares: norms must be equal to the last bit on all ranks.
"""

from __future__ import annotations

import math
import numbers
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

__all__: list[str] = []


class Change(Protocol):
    """A change of each element by itself."""

    def apply(self, gradient: torch.Tensor) -> None:
        """Changes a complete gradient in place."""

    def of_norm(self, norm: torch.Tensor) -> torch.Tensor | None:
        """A norm after the change, from the one before; None: it is not known."""


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
        return norm / size if self.divides else norm * size


@dataclass(frozen=True)
class Limits:
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
    """The part of `read_guard.Guard` that is used here."""

    def norms(self, gradients: list[torch.Tensor], order: float) -> list[torch.Tensor] | None: ...
    def change(self, gradients: list[torch.Tensor], change: Change) -> bool: ...
    def may_stay_in_flight(self, gradients: list[torch.Tensor]) -> bool: ...


class NothingStays:
    """A `Stay` that has every gradient completed."""

    def norms(self, gradients: list[torch.Tensor], order: float) -> list[torch.Tensor] | None:
        """See `read_guard.Guard`."""
        del gradients, order
        return None

    def change(self, gradients: list[torch.Tensor], change: Change) -> bool:
        """See `read_guard.Guard`."""
        del gradients, change
        return False

    def may_stay_in_flight(self, gradients: list[torch.Tensor]) -> bool:
        """See `read_guard.Guard`."""
        del gradients
        return False


_GuardOf = Callable[[list[torch.Tensor]], Stay | None]
_Answer = tuple[Any] | None  # None: the gradients must be completed, then the function is called


def call(func: Callable[..., Any], args: Any, kwargs: Any, guard_of: _GuardOf) -> _Answer:
    """Calls one of the `FUNCTIONS` without completing the gradients in flight among its arguments.

    Args:
        guard_of: the guard of all of the given tensors, if each is in flight.

    Returns:
        The result; None if they must be completed first.
    """
    return FUNCTIONS[func](guard_of, *args, **kwargs) if args else None


def _as_list(tensors: Any) -> list[torch.Tensor]:
    return list(tensors) if isinstance(tensors, (list, tuple)) else []


def _guard_of_list(guard_of: _GuardOf, tensors: Any) -> Stay | None:
    return guard_of(_as_list(tensors)) if _as_list(tensors) else None


# ---- the short way ----------------------------------------------------------------------------

# Attribute of a gradient: (Opened, weak reference to its entry, order of a norm, this norm).
OPEN = "_hvd_order_open"


class Opened:
    """The gradients of one optimizer, from the first use of a norm until elements are read, or
    ``step()``.

    Clipping calls two functions for each gradient while the link waits for ``step()``. So what the
    first calls have checked holds for the others.

    Attributes:
        factor: which the gradients can be multiplied by.
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
    opened, reference, order, norm = getattr(gradient, OPEN, _CLOSED)
    entry = reference() if opened else None
    if entry is None:
        return None
    if func is torch.linalg.vector_norm:
        is_known = type(value) in (int, float) and value == order and not entry.changes
        return (norm,) if is_known else None
    if func is torch.Tensor.mul_:
        last = _last
        is_same = last is not None and last[0] is value and last[1] == value._version
        if last is not None and is_same and last[2] is opened.factor:
            return (gradient,) if opened.note(entry, last[2]) else None
    return None


_CLOSED: tuple[Any, Any, Any, Any] = (None, None, None, None)


# ---- norms ------------------------------------------------------------------------------------


def _norms(guard_of: _GuardOf, gradients: Any, order: Any) -> list[torch.Tensor] | None:
    if isinstance(order, bool) or order not in (2, math.inf):
        return None
    guard = _guard_of_list(guard_of, gradients)
    return None if guard is None else guard.norms(list(gradients), float(order))


def _norm_of_one(guard_of: _GuardOf, gradient: Any, order: Any, more: dict[str, Any]) -> _Answer:
    if any(value not in (None, False) for value in more.values()):  # some dimensions, a dtype
        return None
    norms = _norms(guard_of, [gradient], order)
    return None if norms is None else (norms[0],)


def _vector_norm(
    guard_of: _GuardOf, x: Any, /, ord: Any = 2, dim: Any = None, **more: Any
) -> _Answer:
    return _norm_of_one(guard_of, x, ord, {"dim": dim, **more})


def _norm(guard_of: _GuardOf, x: Any, /, p: Any = "fro", dim: Any = None, **more: Any) -> _Answer:
    return _norm_of_one(guard_of, x, 2 if p == "fro" else p, {"dim": dim, **more})


def _linalg_norm(
    guard_of: _GuardOf, x: Any, /, ord: Any = None, dim: Any = None, **more: Any
) -> _Answer:
    # With an order it is the norm of a matrix.
    return None if ord is not None else _norm_of_one(guard_of, x, 2, {"dim": dim, **more})


def _foreach_norm(
    guard_of: _GuardOf, gradients: Any, /, ord: Any = 2, dtype: Any = None
) -> _Answer:
    norms = None if dtype is not None else _norms(guard_of, gradients, ord)
    return None if norms is None else (norms,)


# ---- changes ----------------------------------------------------------------------------------


_last: tuple[torch.Tensor, int, Factor] | None = None  # all gradients usually get the same


def _factor(value: Any, divides: bool) -> Factor | None:
    global _last
    if isinstance(value, torch.Tensor):
        if value.dim() > 0 or value.requires_grad or not value.is_floating_point():
            return None
        if value.is_inference():  # nobody counts its changes
            return None
        last, version = _last, value._version  # another thread may set _last
        if last is None or last[0] is not value or last[1] != version:
            _last = last = value, version, Factor(value.clone())
        factor = last[2]
        return factor if factor.divides == divides else Factor(factor.value, divides)
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return Factor(float(value), divides) if is_real else None


def _fits(factor: Factor, gradients: list[torch.Tensor]) -> bool:
    """Whether the operators take the factor: from the CPU, or from the gradient's device."""
    value = factor.value
    if not isinstance(value, torch.Tensor) or value.device.type == "cpu":
        return True
    return all(gradient.device == value.device for gradient in gradients)


def _scale(guard_of: _GuardOf, gradients: list[torch.Tensor], other: Any, divides: bool) -> bool:
    guard = guard_of(gradients)
    factor = None if guard is None else _factor(other, divides)
    if guard is None or factor is None or not _fits(factor, gradients):
        return False
    return guard.change(gradients, factor)


def _scale_one(divides: bool) -> Callable[..., _Answer]:
    def scale(guard_of: _GuardOf, self: Any, /, other: Any, **more: Any) -> _Answer:
        return (self,) if not more and _scale(guard_of, [self], other, divides) else None

    return scale


def _scale_all(divides: bool) -> Callable[..., _Answer]:
    def scale(guard_of: _GuardOf, self: Any, /, other: Any) -> _Answer:
        gradients = _as_list(self)
        return (None,) if gradients and _scale(guard_of, gradients, other, divides) else None

    return scale


def _clamp(guard_of: _GuardOf, self: Any, /, min: Any = None, max: Any = None) -> _Answer:
    limits = [limit for limit in (min, max) if limit is not None]
    are_numbers = limits and all(isinstance(limit, numbers.Real) for limit in limits)
    guard = guard_of([self]) if are_numbers else None
    done = guard is not None and guard.change([self], Limits(min, max))
    return (self,) if done else None


def _clamp_all(is_low: bool) -> Callable[..., _Answer]:
    def clamp(guard_of: _GuardOf, self: Any, /, other: Any) -> _Answer:
        guard = _guard_of_list(guard_of, self) if isinstance(other, numbers.Real) else None
        limits = Limits(other, None) if is_low else Limits(None, other)
        done = guard is not None and guard.change(list(self), limits)
        return (None,) if done else None

    return clamp


def _unscale(guard_of: _GuardOf, self: Any, /, found_inf: Any, inv_scale: Any) -> _Answer:
    """What GradScaler does: any element that is not finite makes the norm so."""
    guard = _guard_of_list(guard_of, self)
    factor = None if guard is None else _factor(inv_scale, divides=False)
    norms = None if guard is None or factor is None else guard.norms(list(self), 2.0)
    if guard is None or factor is None or norms is None:
        return None
    finite = torch.stack([norm.double() for norm in norms]).isfinite().all()
    if not guard.change(list(self), factor):
        return None
    found_inf.masked_fill_(~finite.to(found_inf.device), 1.0)
    return (None,)


# ---- the tensor itself ------------------------------------------------------------------------


def _same(guard_of: _GuardOf, self: Any, /, *_: Any) -> _Answer:
    """``detach()`` and ``.data`` of a gradient, which needs no gradient itself."""
    guard = guard_of([self])
    return (self,) if guard is not None and guard.may_stay_in_flight([self]) else None


def _set_data(guard_of: _GuardOf, self: Any, /, value: Any) -> _Answer:
    """The end of ``gradient.data *= 2``."""
    return (None,) if value is self and _same(guard_of, self) is not None else None


_DATA: Any = torch.Tensor.data

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
    torch.Tensor.detach: _same,
    _DATA.__get__: _same,
    _DATA.__set__: _set_data,
}
