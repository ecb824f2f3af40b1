"""Finds the module that reads a parameter only in C++, and finishes the parameter at its entry.

A kernel of an extension, or a ``torch.autograd.Function`` that passes its tensors on, reads
parameters invisibly to Python. The autograd graph records these reads. Nodes are numbered in the
order in which operators ran, so the first node that consumes a parameter lies between the entry
and the exit of one innermost module call. If no Python read of the parameter was observed in that
call, the parameter is finished at the entry of that module from then on. A hook for all modules
does that: a hook on the module itself would be pickled, copied and scripted with it.

The search runs in the watched steps (consumption.py). If a program changes between them, it meets
the lock on the parameter's memory, never an old value.
"""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.modules import module as module_hooks

from hvd_order._native import _torch as native
from hvd_order.torch.parameters import graph_capture
from hvd_order.torch.parameters.compiled_regions import Enter
from hvd_order.torch.parameters.entry import ParameterEntry

__all__: list[str] = []

_MOST_CALLS = 100_000  # of modules, in one step that is watched


@dataclass(eq=False)
class _Call:
    """One call of a module.

    Attributes:
        first, end: numbers of the nodes that were made in the call: first <= number < end.
        read: parameters read in the call from Python, outside of inner calls.
    """

    module: weakref.ref[torch.nn.Module]
    place: int
    depth: int
    first: int
    end: int | None = None
    read: set[ParameterEntry] = field(default_factory=set)


@dataclass(frozen=True)
class Proof:
    """The graph's evidence about parameters without an observed first reader.

    Attributes:
        finished_at: parameters that a module finishes at its entry from now on, with the number of
            reads observed before that entry.
        unknown: parameters that were read outside of any module.
    """

    finished_at: dict[ParameterEntry, int] = field(default_factory=dict)
    unknown: set[ParameterEntry] = field(default_factory=set)


class HiddenReaders:
    """Watches module calls, and from then on finishes the parameters that they read invisibly."""

    def __init__(self, enter: Enter) -> None:
        """Starts without watching.

        Args:
            enter: finishes parameters that are about to be read.
        """
        self._enter = graph_capture.outside(enter)
        self._finished_at: dict[int, _EnteredModule] = {}  # by the module's id
        self._hooks: list[Any] = []  # finish what those modules read
        weakref.finalize(self, _remove, self._hooks).atexit = False
        weakref.finalize(self, _watchers.end, id(self)).atexit = False
        self._calls: list[_Call] = []
        self._open: list[_Call] = []
        self._outside: set[ParameterEntry] = set()
        self._entries: dict[
            int, ParameterEntry
        ] = {}  # not consumed by any call so far, by parameter
        self._consumed: dict[ParameterEntry, int] = {}  # number of the first consuming node
        self._thread = 0
        self._boundary: Callable[[], int] = int

    def watch(self, entries: Iterable[ParameterEntry], boundary: Callable[[], int]) -> None:
        """Watches all module calls until :meth:`prove` or :meth:`stop`.

        Args:
            entries: the parameters whose readers are searched for.
            boundary: called at each entry and exit, so that reads in each call are observed anew;
                returns the number of reads observed.
        """
        self.stop()
        self._entries = {id(entry.parameter): entry for entry in entries}
        self._boundary = boundary
        self._thread = threading.get_ident()
        _watchers.begin(self)

    def entered(self, module: torch.nn.Module) -> None:
        """Records the entry of a module."""
        if threading.get_ident() != self._thread:
            return
        if len(self._calls) == _MOST_CALLS:  # an evaluation, not a step: use the next watch
            self.stop()
            return
        call = _Call(
            weakref.ref(module), self._boundary(), len(self._open),
            torch._C._autograd._get_sequence_nr(),
        )  # fmt: skip
        self._calls.append(call)
        self._open.append(call)

    def left(self, module: torch.nn.Module, result: Any) -> None:
        """Records the exit of a module, and what its result tells about it."""
        if threading.get_ident() != self._thread or not _watchers.has(self):
            return
        self._boundary()
        while self._open:  # a call that raised has no exit of its own
            call = self._open.pop()
            call.end = torch._C._autograd._get_sequence_nr()
            if call.module() is module:
                break
        # At once, because keeping the graph until the next gradient would keep its activations.
        if not self._open and self._entries:
            self._consumed |= _first_consumers(_nodes(result), self._entries)
            for entry in self._consumed:
                self._entries.pop(id(entry.parameter), None)

    def note(self, entry: ParameterEntry) -> None:
        """Records a read of ``entry`` from Python."""
        (self._open[-1].read if self._open else self._outside).add(entry)

    def stop(self) -> None:
        """Ends the watch."""
        _watchers.end(id(self))
        self._calls.clear()
        self._open.clear()
        self._outside.clear()
        self._entries.clear()
        self._consumed.clear()

    def prove(self) -> Proof:
        """Ends the watch; modules finish the parameters that they read invisibly from now on."""
        proof = Proof()
        for entry, number in self._consumed.items():
            inside = [c for c in self._calls if c.first <= number < (c.end or 0)]
            inside.sort(key=lambda c: c.depth, reverse=True)
            if entry in (inside[0].read if inside else self._outside):
                continue
            for call in inside:
                module = call.module()
                # TorchScript modules have no hooks; their callers have.
                if module is not None and not isinstance(module, torch.jit.ScriptModule):
                    proof.finished_at[entry] = call.place
                    self._finish_at(module, entry)
                    break
            else:
                proof.unknown.add(entry)
        self.stop()
        return proof

    def _finish_at(self, module: torch.nn.Module, entry: ParameterEntry) -> None:
        at_entry = self._finished_at.get(id(module))
        if at_entry is None or at_entry.module() is not module:
            at_entry = self._finished_at[id(module)] = _EnteredModule(weakref.ref(module))
        at_entry.parameters.setdefault(entry, entry.parameter)
        if not self._hooks:
            self._hooks.append(_finish_at_entry(self._finished_at, self._enter))

    def close(self) -> None:
        """Removes all hooks."""
        self.stop()
        _remove(self._hooks)
        self._finished_at.clear()


class _Watchers:
    """All that watch at a time, and the two hooks that call them.

    A graph that torch.compile makes while there are hooks for all modules is guarded by their
    numbers. So the hooks keep theirs from one watch to the next.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # guards what follows; the collector may call end() anywhere
        self._watching: dict[int, weakref.ref[HiddenReaders]] = {}
        self._installed = False
        self._hooks: list[tuple[Any, Callable[..., None]]] = []  # with their handles

    def begin(self, watcher: HiddenReaders) -> None:
        """Has all calls of modules reported to `watcher`, which this does not keep alive."""
        _say_nothing_of_hooks()
        with self._lock:
            self._watching[id(watcher)] = weakref.ref(watcher)
            if not self._installed:
                self._install()

    def end(self, watcher: int) -> None:
        """Ends what `begin` has begun, if it has."""
        with self._lock:
            self._watching.pop(watcher, None)
            if self._installed and not self._watching:
                self._installed = False
                for handle, _ in self._hooks:
                    handle.remove()

    def has(self, watcher: HiddenReaders) -> bool:
        """Whether it watches."""
        return id(watcher) in self._watching

    def _install(self) -> None:
        self._installed = True
        for handle, hook in self._hooks:
            handle.hooks_dict_ref()[handle.id] = hook
            for extra in handle.extra_dict_ref:
                extra()[handle.id] = True
        if not self._hooks:
            before, after = self._before, self._after
            self._hooks = [
                (module_hooks.register_module_forward_pre_hook(before), before),
                (module_hooks.register_module_forward_hook(after, always_call=True), after),
            ]

    def _before(self, module: torch.nn.Module, _args: Any) -> None:
        if not torch.compiler.is_compiling():
            with native.CleanRoom():  # no mode of the program's sees what is done here
                for watcher in self._alive():
                    watcher.entered(module)

    def _after(self, module: torch.nn.Module, _args: Any, result: Any) -> None:
        if not torch.compiler.is_compiling():
            with native.CleanRoom():
                for watcher in self._alive():
                    watcher.left(module, result)

    def _alive(self) -> list[HiddenReaders]:
        found = [watching() for watching in list(self._watching.values())]
        return [watcher for watcher in found if watcher is not None]


_watchers = _Watchers()


@dataclass(frozen=True)
class _EnteredModule:
    """The parameters to finish whenever a module is entered."""

    module: weakref.ref[torch.nn.Module]
    parameters: dict[ParameterEntry, torch.Tensor] = field(default_factory=dict)


def _finish_at_entry(finished_at: dict[int, _EnteredModule], enter: Enter) -> Any:
    """A handle of the hook that finishes at entry; the hook must not keep the exchange alive."""

    def before(module: torch.nn.Module, _args: Any) -> None:
        # A compiled region finishes the parameters that it reads at its own entry.
        if torch.compiler.is_compiling():
            return
        at_entry = finished_at.get(id(module))
        if at_entry is not None and at_entry.module() is module:
            with native.CleanRoom():
                enter(list(at_entry.parameters.values()))

    _say_nothing_of_hooks()
    return module_hooks.register_module_forward_pre_hook(before)


@functools.cache
def _say_nothing_of_hooks() -> None:
    """Suppresses torch's warning about hooks for all modules, which are hvd_order's here.

    Compiled modules warn that such hooks run once more for them, which is harmless for these
    hooks. A user with hooks of this kind got the warning when the module ran first.
    """
    warnings.filterwarnings(
        "ignore", r"Using `torch\.compile\(module\)` when there are global hooks", UserWarning
    )


def _remove(handles: list[Any]) -> None:
    while handles:
        handles.pop().remove()


def _first_consumers(
    made: Iterable[Any], entries: Mapping[int, ParameterEntry]
) -> dict[ParameterEntry, int]:
    """Number of each parameter's first consuming node, among the ancestors of ``made``."""
    first: dict[ParameterEntry, int] = {}
    todo = list(made)
    seen = set(todo)
    while todo:
        node = todo.pop()
        for source, _ in node.next_functions:
            if source is None:
                continue
            variable = getattr(source, "variable", None)
            if variable is None:
                if source not in seen:
                    seen.add(source)
                    todo.append(source)
            elif (entry := entries.get(id(variable))) is not None:
                number = node._sequence_nr()
                first[entry] = min(first.get(entry, number), number)
    return first


def _nodes(value: Any, depth: int = 0) -> Iterator[Any]:
    """The nodes that made the tensors in a module's result."""
    if isinstance(value, torch.Tensor):
        if value.grad_fn is not None:
            yield value.grad_fn
    elif depth < 4:
        if isinstance(value, (list, tuple)):
            parts: Iterable[Any] = value
        elif isinstance(value, dict):
            parts = value.values()
        else:
            parts = getattr(value, "__dict__", {}).values()
        for part in parts:
            yield from _nodes(part, depth + 1)
