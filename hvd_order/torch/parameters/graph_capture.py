"""Keeps ``torch.compile`` out of hvd_order: code that calls it may be compiled, it itself is not.

Dynamo compiles each frame of Python that runs below a compiled function. A frame of ours waits for
other ranks and changes classes of tensors: no part of a graph. In a graph it would run while Dynamo
traces, with fake tensors, and once instead of in every step. So calls of hvd_order break the graph,
and what they run (the user's optimizer, for example) is not compiled either.

*Compiled autograd* runs a backward pass as one graph. Gradients reach their hooks inside of it,
where Dynamo looks at each parameter and its ``.grad``; and callbacks for the end of the pass, which
a hook queues there, are never called (PyTorch 2.13). So it is refused.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch._C._dynamo.eval_frame import set_eval_frame

from hvd_order.base.errors import InvalidUsage
from hvd_order.engine.job import process

__all__: list[str] = []

_Function = TypeVar("_Function", bound=Callable[..., Any])

_REASON = (
    "hvd_order exchanges gradients with other ranks, which is no part of a graph: leave "
    "fullgraph=True out, or call it outside of the compiled function"
)
# Not torch.parameters: its hooks and replacements run in modules of the program, step aside while
# Dynamo traces, and have to be traced for that.
_UNTRACED = (
    "torch.collectives", "torch.elastic", "torch.gradients", "torch.optimizer", "torch.profile",
    "torch.rank_check", "torch.shards", "torch.updates", "c10d",
)  # fmt: skip


@functools.cache
def _leave_out() -> None:
    for package in _UNTRACED:
        torch._dynamo.trace_rules.add(f"hvd_order.{package}")


# Dynamo takes a second to import. A program that trains imports it anyhow, with its first
# optimizer; one that asks for the version, or for help, does not.
process.at_init(_leave_out)


class _Caller(threading.local):
    compiled = False


_caller = _Caller()


def outside(function: _Function) -> _Function:
    """Makes ``function`` run as if no caller were compiled.

    As ``torch.compiler.disable``, which imports Dynamo.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        callback = cast("Any", set_eval_frame(None))
        if callback is None:
            return function(*args, **kwargs)
        before, _caller.compiled = _caller.compiled, True
        try:
            return function(*args, **kwargs)
        finally:
            _caller.compiled = before
            set_eval_frame(callback)

    marked = cast("Any", call)
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = _REASON
    return cast("_Function", call)


def has_compiled_caller() -> bool:
    """Whether the function that runs `outside` was called from a compiled one."""
    return _caller.compiled


def refuse_compiled_backward(name: str) -> None:
    """Raises if compiled autograd runs the backward pass of this moment.

    Args:
        name: the parameter whose gradient has come.
    """
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    if module is not None and getattr(module, "in_compiled_autograd_region", False):
        raise InvalidUsage(
            f"compiled autograd runs this backward pass, inside of which the gradient of '{name}' "
            "cannot be sent to the other ranks. Leave it off: set "
            "torch._dynamo.config.compiled_autograd = False, or call backward() inside of "
            "torch._dynamo.compiled_autograd._disable(). The model, and the whole step, may be "
            "compiled"
        )
