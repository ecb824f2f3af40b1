"""What a tensor tells about itself without its elements.

Reads of these finish nothing. A name missing here costs only overlap.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

__all__: list[str] = []

_ATTRIBUTES = (
    "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad", "grad_fn",
    "is_sparse", "is_cuda", "is_cpu", "is_meta", "is_mkldnn", "is_quantized", "is_nested",
    "is_xpu", "is_mps", "itemsize", "nbytes", "retains_grad", "name", "output_nr",
)  # fmt: skip
_CHANGEABLE = ("grad", "requires_grad")
_METHODS = (
    "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size",
    "is_contiguous", "is_floating_point", "is_complex", "get_device", "requires_grad_", "__len__",
    "register_hook", "register_post_accumulate_grad_hook",
)  # fmt: skip

# As a __torch_function__ gets them.
FUNCTIONS: frozenset[Any] = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES]
    + [getattr(torch.Tensor, name).__set__ for name in _CHANGEABLE]
    + [getattr(torch.Tensor, name) for name in _METHODS]
    + [torch.Tensor.__hash__, torch.is_floating_point, torch.is_complex, torch.numel]
)

Prepare = Callable[[Any], object]


def _called(function: Callable[..., Any], finish: Prepare, prepare: Prepare | None) -> Any:
    """``function`` of a tensor, which does not ask the tensor's class first.

    A mode sees the call, as it sees those of all tensors, and may read elements. Where classes are
    not to be asked, nothing is finished: there the optimizer looks several times at each parameter
    that it updates.
    """
    may_ask = torch._C._is_torch_function_enabled
    watching_modes = torch._C._len_torch_function_stack
    aside = torch._C.DisableTorchFunctionSubclass

    def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if not may_ask():
            return function(tensor, *args, **kwargs)
        if watching_modes():
            finish(tensor)
            return function(tensor, *args, **kwargs)
        if prepare is not None:
            prepare(tensor)
        with aside():
            return function(tensor, *args, **kwargs)

    return call


def _attribute(name: str, finish: Prepare, prepare: Prepare | None) -> property:
    plain = getattr(torch.Tensor, name)
    may_ask, get, asked = (
        torch._C._is_torch_function_enabled, plain.__get__, _called(plain.__get__, finish, prepare),
    )  # fmt: skip

    def read(tensor: Any) -> Any:
        return asked(tensor) if may_ask() else get(tensor)

    def delete(tensor: Any) -> None:
        finish(tensor)
        plain.__delete__(tensor)

    return property(
        read,
        _called(plain.__set__, finish, prepare) if name in _CHANGEABLE else None,
        delete,
    )


def members(finish: Prepare, before_grad: Prepare) -> dict[str, Any]:
    """Attributes and methods for a class whose tensors are finished when their class is asked.

    Args:
        finish: finishes a tensor.
        before_grad: called before ``.grad`` is read or set.
    """
    found: dict[str, Any] = {
        name: _attribute(name, finish, before_grad if name == "grad" else None)
        for name in _ATTRIBUTES
    }
    for name in _METHODS:
        plain = getattr(torch.Tensor, name)
        found[name] = functools.wraps(plain)(_called(plain, finish, None))
    return found


def own_members(user_class: type) -> dict[str, Any]:
    """The members of this kind that the user's class has itself, in place of the tensor's."""
    found = {}
    for name in (*_ATTRIBUTES, *_METHODS):
        own = inspect.getattr_static(user_class, name)
        if own is not inspect.getattr_static(torch.Tensor, name):
            found[name] = own
    return found
