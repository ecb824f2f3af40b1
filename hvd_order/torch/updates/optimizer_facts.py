"""Optimizer facts that the ranks compare: class and hyper-parameters, as text."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim import Optimizer

__all__ = ["class_of", "hyper_parameters"]

# A larger tensor in a group is working data of the optimizer, not a hyper-parameter.
_MOST_ELEMENTS = 16
_NOT_COMPARED = ("params", "param_names")


def class_of(optimizer: Optimizer) -> dict[str, str]:
    """The user's class, and the number of parameter groups."""
    user_class = getattr(optimizer, "_hvd_base", type(optimizer))
    return {
        "class": f"{user_class.__module__}.{user_class.__qualname__}",
        "the number of parameter groups": str(len(optimizer.param_groups)),
    }


def hyper_parameters(optimizer: Optimizer) -> dict[str, str]:
    """Every hyper-parameter of every group that can be compared.

    Functions and other objects, whose text may contain addresses, are left out.
    """
    found = {}
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            text = None if key in _NOT_COMPARED else _text(value)
            if text is not None:
                found[f"{key} of parameter group {number}"] = text
    return found


def _text(value: Any) -> str | None:
    """Text that is equal for equal values, in a list or a tuple; None: not compared."""
    if isinstance(value, torch.Tensor):
        plain = value.layout == torch.strided and not value.is_meta
        if not plain or value.numel() > _MOST_ELEMENTS:
            return None
        return f"tensor {value.dtype} {_text(value.detach().tolist())}"
    if value is None or isinstance(value, (bool, str, bytes, torch.dtype)):
        return repr(value)
    if isinstance(value, (int, float)):  # 1 and 1.0 are the same learning rate
        exact = isinstance(value, int) or (math.isfinite(value) and value == int(value))
        return repr(int(value)) if exact else repr(float(value))
    if isinstance(value, (list, tuple)) and len(value) <= _MOST_ELEMENTS:
        texts = [_text(each) for each in value]
        return None if None in texts else f"({', '.join(map(str, texts))})"
    return None
