"""Values of optimizers: which of them are settings, and which are equal."""

from __future__ import annotations

import types
from typing import Any

import torch

__all__: list[str] = []

_ATOMS = (
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device,
    types.FunctionType, types.BuiltinFunctionType,
)  # fmt: skip


_IDENTITY: Any = object.__eq__  # of classes without an own equality


def is_plain(value: object) -> bool:
    """Whether a value is a setting: a number, a name, a function, or a container of these."""
    if isinstance(value, _ATOMS):
        return True
    if isinstance(value, torch.Tensor):
        return value.numel() <= 1
    if type(value) is dict:
        return all(map(is_plain, value.values()))
    return type(value) in (list, tuple) and all(map(is_plain, value))  # type: ignore[call-overload]


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, with tensors to the last bit and NaN equal to NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype or one.layout != other.layout:
            return False
        return bool(((one == other) | ((one != one) & (other != other))).all())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "tobytes"):  # numpy's arrays
        return bool(one.tobytes() == other.tobytes())
    if type(one).__eq__ is _IDENTITY and hasattr(one, "__dict__"):
        return one is other or same(vars(one), vars(other))
    return bool(one == other) or (one != one and other != other)
