"""The places in torch that take a tensor without asking its class whether it may be read.

All other readers ask for ``__torch_function__`` of each tensor (read_guard.py). These few are
replaced by functions that finish parameters and gradients first. Without one of them, its readers
would meet the lock on the memory.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import Parameter

__all__: list[str] = []

_TAKES_TENSOR = (
    # Function transforms wrap their arguments, and read them from inside of the dispatcher.
    ("torch._functorch.eager_transforms", "_wrap_for_grad"),
    ("torch._functorch.eager_transforms", "_wrap_functional_tensor"),
    ("torch._functorch.vmap", "_add_batch_dim"),
)


def _first(function: Callable[..., Any], finish: Callable[[Any], object]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(value: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():  # else a compiled region has finished them
            finish(value)
        return function(value, *args, **kwargs)

    return call


def ask(finish: Callable[[Any], object], make_ordinary: Callable[[Any], object]) -> None:
    """Has ``finish`` called with what these places take, before they take it.

    Args:
        finish: finishes the parameters and gradients in a value.
        make_ordinary: finishes the parameters alone; some functions leave gradients in flight.
    """
    for path, name in _TAKES_TENSOR:
        module = importlib.import_module(path)
        function = getattr(module, name, None)
        if function is not None:
            setattr(module, name, _first(function, finish))

    # nn.Parameter(p) treats exactly its own class as an ordinary tensor.
    make: Callable[..., Any] = Parameter.__new__

    @functools.wraps(make)
    def new(cls: type, data: Any = None, requires_grad: bool = True) -> Any:
        if data is not None and not torch.compiler.is_compiling():
            finish(data)
        return make(cls, data, requires_grad)

    Parameter.__new__ = staticmethod(new)  # type: ignore[method-assign]

    # Functions in Python ask all arguments only if one of the first has answered: they then look
    # at the classes alone.
    overloaded: Callable[..., Any] | None = getattr(torch.overrides, "_get_overloaded_args", None)
    if overloaded is not None:
        collect = overloaded

        @functools.wraps(collect)
        def all_asked(relevant_args: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
            relevant = tuple(relevant_args)
            make_ordinary(relevant)
            return collect(relevant, *args, **kwargs)

        torch.overrides._get_overloaded_args = all_asked
