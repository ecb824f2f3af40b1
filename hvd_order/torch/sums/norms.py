"""Norms of gradients from the sums of squares of their sums, equal to those of their elements.

A sum of squares is a float64 number, known before the elements. Where torch's own norm of the
elements would be infinite, so is the one from here; and what the elements would have to tell is
"not known" here:

* whether a change takes elements out of the range of their type, and back,
* what a complete gradient is after the program has read, and may have changed, its elements.

The last is asked of the elements, whoever has had an alias, an array or an address of them. Their
own sum of squares, in another order of additions and with rounded changes, is compared with what is
known. If both agree as far as rounding goes, the known norm is taken, which all ranks have to the
last bit, whether they have read elements or not.
"""

from __future__ import annotations

import math

import torch

from hvd_order.torch.parameters.entry import ParameterEntry

__all__: list[str] = []

# More than another order of additions can make of a sum of squares in float64.
_ORDER_OF_ADDITIONS = 1e-10
# Of float64 numbers whose squares are float64 numbers as well.
_SQUARABLE = (1e-150, 1e150)


def in_type(norms: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """2-norms in the type of their gradients.

    torch adds up the squares of elements of 16 or 32 bits in float32, where they can be infinite.
    """
    if dtype == torch.float64:
        return norms
    overflows = norms.square().float().isinf()
    return norms.to(dtype).masked_fill(overflows, math.inf)


def after_changes(
    entry: ParameterEntry, norm: torch.Tensor, postscale: float, rounds: bool
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """A 2-norm of a gradient from that of its sum.

    Args:
        norm: that of the sum, float64, after the postscale.
        postscale: factor of the sum.
        rounds: changes are made in the gradient's type. (Those of shards of 16 bits are not.)

    Returns:
        The norm, float64, and the most by which that of the elements may differ; None: the norm is
        not known.
    """
    changes = len(entry.changes) + (postscale != 1.0)
    dtype = entry.gradient.dtype
    if changes and rounds and dtype == torch.float16:
        return None  # its range is so small that elements vanish, or become infinite
    error = norm * _ORDER_OF_ADDITIONS
    if postscale != 1.0:
        error = error + _rounding(entry, norm)
    if entry.changes and dtype == torch.float64 and not _holds(norm, dtype):
        return None  # the squares were infinite, or vanished
    for change in entry.changes:
        after, error_after = change.of_norm(norm), change.of_norm(error)
        if after is None or error_after is None or not _holds(after, dtype):
            return None
        norm, error = after, error_after + _rounding(entry, after)
    return norm, error


def _rounding(entry: ParameterEntry, norm: torch.Tensor) -> torch.Tensor:
    """The most by which rounding of all elements changes their norm, subnormal ones included."""
    info = torch.finfo(entry.gradient.dtype)
    return norm * info.eps + info.smallest_normal * math.sqrt(entry.gradient.numel())


def _holds(norm: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether elements of a type, of this norm, can all be in the type's range.

    True on a device, where the answer would be a wait.
    """
    if norm.device.type != "cpu":
        return True
    value = norm.item()
    if dtype == torch.float64:
        return _SQUARABLE[0] < value < _SQUARABLE[1]
    return not math.isfinite(value) or value <= torch.finfo(dtype).max


def of_complete(entry: ParameterEntry, norm: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """The 2-norm of a complete gradient, in its type.

    Args:
        norm, error: as `after_changes` returns them.
    """
    gradient, dtype = entry.gradient, entry.gradient.dtype
    of_elements = torch.linalg.vector_norm(gradient, dtype=torch.float64)
    agrees = (of_elements - norm).abs() <= error.masked_fill(~norm.isfinite(), 0.0)
    agrees |= (of_elements == norm) | (of_elements.isnan() & norm.isnan())
    known = in_type(norm, dtype)
    if agrees.device.type != "cpu":
        return torch.where(agrees, known, torch.linalg.vector_norm(gradient))
    return known if agrees.item() else torch.linalg.vector_norm(gradient)


def is_finite(
    entry: ParameterEntry, norm: torch.Tensor, postscale: float, rounds: bool
) -> torch.Tensor | None:
    """Whether all elements of a gradient are finite; None: the 2-norm of its sum does not tell.

    Args:
        norm, postscale, rounds: as for `after_changes`.
    """
    if not entry.changes and abs(postscale) <= 1.0:
        if entry.gradient.dtype != torch.float64:  # squares of all others are finite in float64
            return norm.isfinite()
        on_device = norm.device.type != "cpu"
        return norm.isfinite() if not on_device and math.isfinite(norm.item()) else None
    if norm.device.type != "cpu":
        return None
    after = after_changes(entry, norm, postscale, rounds)
    if after is None or (entry.gradient.dtype == torch.float64 and not after[0].isfinite()):
        return None
    return after[0].isfinite() if _holds(after[0], entry.gradient.dtype) else None
