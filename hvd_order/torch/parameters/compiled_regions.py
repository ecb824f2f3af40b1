"""Finishes the parameters of compiled modules before these run.

A graph made by ``torch.compile`` is guarded by the class of every parameter it reads. If it gets a
`read_guard.PendingParameter`, its result is right, but it compiles again and breaks at each such
parameter. So the parameters of a compiled module are finished before the module runs, outside of
the graph: ``fullgraph=True`` works, and nothing is traced. Compile block by block (each block an
entry) to keep overlap with the next forward pass.

A compiled function that reads parameters of a module has no such entry unless it is the module's
forward.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvd_order.torch.parameters import graph_capture
from hvd_order.torch.parameters.entry import ParameterEntry

__all__: list[str] = []

Enter = Callable[[list[torch.Tensor]], None]


class CompiledRegions:
    """Calls a function with a compiled module's parameters whenever that module is entered."""

    def __init__(self, enter: Enter) -> None:
        """Starts without regions; :meth:`find` finds them."""
        self._enter = graph_capture.outside(enter)
        self._undo: list[Callable[[], Any]] = []

    def find(self, entries: Sequence[ParameterEntry]) -> None:
        """Finds the compiled modules that own any of the parameters; call after they have run
        once.

        The user passes parameters, not modules, so this searches with the garbage collector. The
        search takes some hundredths of a second, in the first two steps.
        """
        self.close()
        known = {id(entry.parameter) for entry in entries}
        for module in [o for o in gc.get_objects() if issubclass(type(o), torch.nn.Module)]:
            parameters: list[torch.Tensor] | None = None
            compiled_in_place = module._compiled_call_impl is not None
            if compiled_in_place or isinstance(module, torch._dynamo.OptimizedModule):
                parameters = [p for p in module.parameters() if id(p) in known]
            if not parameters:
                continue
            if compiled_in_place:
                self._wrap_call(module, parameters)
            else:
                self._add_hook(module, parameters)

    def _add_hook(self, module: torch.nn.Module, parameters: list[torch.Tensor]) -> None:
        def before(_module: torch.nn.Module, _args: Any) -> None:
            self._enter(parameters)

        self._undo.append(module.register_forward_pre_hook(before, prepend=True).remove)

    def _wrap_call(self, module: Any, parameters: list[torch.Tensor]) -> None:
        # A pre-hook of a module compiled in place is part of its graph; this wrapper is outside.
        compiled = module._compiled_call_impl

        @functools.wraps(compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():  # else part of a larger region
                self._enter(parameters)
            return compiled(*args, **kwargs)

        module._compiled_call_impl = call
        self._undo.append(functools.partial(setattr, module, "_compiled_call_impl", compiled))

    def close(self) -> None:
        """Removes all hooks."""
        for undo in self._undo:
            undo()
        self._undo.clear()
