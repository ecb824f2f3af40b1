"""Parameters that only C++ reads: the module at whose entry they are finished.

A kernel of an extension, or a ``torch.autograd.Function`` that hands its tensors on, reads
parameters where Python does not see it. The autograd graph tells what they consumed: nodes are
numbered in the order in which operators ran, so the first node that consumes a parameter lies
between the entry and the exit of one innermost module call. Where nothing in that call was seen to
read the parameter from Python, it is finished at the entry of that module from then on. A hook for
all modules does that: one on the module itself would be pickled, copied and scripted with it.

This is looked up in the steps that are watched (consumption.py). A program that changes meanwhile
meets the lock on the parameter's memory, never an old value.
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

from hvd_order import _torch as native
from hvd_order.torch.parameters.compiled_regions import Enter
from hvd_order.torch.parameters.entry import ParameterEntry

__all__: list[str] = []

_MOST_CALLS = 100_000  # of modules, in one step that is watched


@dataclass(eq=False)
class _Call:
    """One call of a module.

    Attributes:
        first, end: numbers of the nodes that were made in it: first <= number < end.
        read: what was seen to be read in it, and not in a call inside of it.
    """

    module: weakref.ref[torch.nn.Module]
    place: int
    depth: int
    first: int
    end: int | None = None
    read: set[ParameterEntry] = field(default_factory=set)


@dataclass(frozen=True)
class Proof:
    """What the graph tells of parameters whose first reader was not seen.

    Attributes:
        finished_at: those that a module finishes at its entry from now on, with how many reads had
            been seen before that.
        unknown: those that were read outside of any module.
    """

    finished_at: dict[ParameterEntry, int] = field(default_factory=dict)
    unknown: set[ParameterEntry] = field(default_factory=set)


class HiddenReaders:
    """Watches module calls, and finishes what they read unseen from then on."""

    def __init__(self, enter: Enter) -> None:
        """Watches nothing.

        Args:
            enter: finishes parameters that are about to be read.
        """
        self._enter = torch._dynamo.disable(enter)
        self._finished_at: dict[int, _Entry] = {}  # by the module's id
        self._hooks: list[Any] = []  # finish what those modules read
        self._watching: list[Any] = []  # hooks that watch
        for handles in (self._hooks, self._watching):
            weakref.finalize(self, _remove, handles).atexit = False
        self._calls: list[_Call] = []
        self._open: list[_Call] = []
        self._outside: set[ParameterEntry] = set()
        self._entries: dict[
            int, ParameterEntry
        ] = {}  # that no call has consumed so far, by parameter
        self._consumed: dict[ParameterEntry, int] = {}  # number of the first node that did
        self._thread = 0
        self._boundary: Callable[[], int] = int

    def watch(self, entries: Iterable[ParameterEntry], boundary: Callable[[], int]) -> None:
        """Watches all module calls until :meth:`prove` or :meth:`stop`.

        Args:
            entries: whose parameters' readers are looked for.
            boundary: called at each entry and exit, so that reads in each call are seen anew;
                returns how many reads have been seen.
        """
        self.stop()
        self._entries = {id(entry.parameter): entry for entry in entries}
        self._boundary = boundary
        self._thread = threading.get_ident()
        # torch's list of these hooks must not keep this alive.
        entered, left = weakref.WeakMethod(self._entered), weakref.WeakMethod(self._left)

        def before(module: torch.nn.Module, _args: Any) -> None:
            if not torch.compiler.is_compiling() and (call := entered()) is not None:
                with native.CleanRoom():  # no mode of the program's sees what is done here
                    call(module)

        def after(module: torch.nn.Module, _args: Any, result: Any) -> None:
            if not torch.compiler.is_compiling() and (call := left()) is not None:
                with native.CleanRoom():
                    call(module, result)

        _say_nothing_of_hooks()
        self._watching += [
            module_hooks.register_module_forward_pre_hook(before),
            module_hooks.register_module_forward_hook(after, always_call=True),
        ]

    def _entered(self, module: torch.nn.Module) -> None:
        if threading.get_ident() != self._thread:
            return
        if len(self._calls) == _MOST_CALLS:  # an evaluation, not a step: the next look is as good
            self.stop()
            return
        call = _Call(
            weakref.ref(module), self._boundary(), len(self._open),
            torch._C._autograd._get_sequence_nr(),
        )  # fmt: skip
        self._calls.append(call)
        self._open.append(call)

    def _left(self, module: torch.nn.Module, result: Any) -> None:
        if threading.get_ident() != self._thread or not self._watching:
            return
        self._boundary()
        while self._open:  # a call that raised has no exit of its own
            call = self._open.pop()
            call.end = torch._C._autograd._get_sequence_nr()
            if call.module() is module:
                break
        # At once: who kept the graph until the next gradient would keep its activations.
        if not self._open and self._entries:
            self._consumed |= _first_consumers(_nodes(result), self._entries)
            for entry in self._consumed:
                self._entries.pop(id(entry.parameter), None)

    def note(self, entry: ParameterEntry) -> None:
        """``entry`` is read from Python."""
        (self._open[-1].read if self._open else self._outside).add(entry)

    def stop(self) -> None:
        """Ends the watch."""
        _remove(self._watching)
        self._calls.clear()
        self._open.clear()
        self._outside.clear()
        self._entries.clear()
        self._consumed.clear()

    def prove(self) -> Proof:
        """Ends the watch, and has modules finish what they read unseen."""
        proof = Proof()
        for entry, number in self._consumed.items():
            inside = [c for c in self._calls if c.first <= number < (c.end or 0)]
            inside.sort(key=lambda c: c.depth, reverse=True)
            if entry in (inside[0].read if inside else self._outside):
                continue
            for call in inside:
                module = call.module()
                # TorchScript's have no hooks; what calls them has.
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
            at_entry = self._finished_at[id(module)] = _Entry(weakref.ref(module))
        at_entry.parameters.setdefault(entry, entry.parameter)
        if not self._hooks:
            self._hooks.append(_finish_at_entry(self._finished_at, self._enter))

    def close(self) -> None:
        """Takes all hooks out again."""
        self.stop()
        _remove(self._hooks)
        self._finished_at.clear()


@dataclass(frozen=True)
class _Entry:
    """What is finished whenever a module is entered."""

    module: weakref.ref[torch.nn.Module]
    parameters: dict[ParameterEntry, torch.Tensor] = field(default_factory=dict)


def _finish_at_entry(finished_at: dict[int, _Entry], enter: Enter) -> Any:
    """A handle of the hook that does so; it must not keep the exchange alive."""

    def before(module: torch.nn.Module, _args: Any) -> None:
        # A compiled region finishes at its own entry what it reads.
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
    """Spares the user torch's warning about hooks for all modules, which are ours.

    Compiled modules warn that such hooks run once more for them, which ours may. Whoever has hooks
    of his own has been warned when the module ran first.
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
    """The number of the first node that consumes each parameter, of those that led to ``made``."""
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
    """The nodes that made the tensors in what a module returned."""
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
