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
from hvd_order.torch.parameters.entry import Slot

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
    read: set[Slot] = field(default_factory=set)


@dataclass(frozen=True)
class Proof:
    """What the graph tells of parameters whose first reader was not seen.

    Attributes:
        finished_at: those that a module finishes at its entry from now on, with how many reads had
            been seen before that.
        unknown: those that were read outside of any module.
    """

    finished_at: dict[Slot, int] = field(default_factory=dict)
    unknown: set[Slot] = field(default_factory=set)


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
        self._outside: set[Slot] = set()
        self._slots: dict[int, Slot] = {}  # that no call has consumed so far, by parameter
        self._consumed: dict[Slot, int] = {}  # number of the first node that did
        self._thread = 0
        self._boundary: Callable[[], int] = int

    def watch(self, slots: Iterable[Slot], boundary: Callable[[], int]) -> None:
        """Watches all module calls until :meth:`prove` or :meth:`stop`.

        Args:
            slots: whose parameters' readers are looked for.
            boundary: called at each entry and exit, so that reads in each call are seen anew;
                returns how many reads have been seen.
        """
        self.stop()
        self._slots = {id(slot.parameter): slot for slot in slots}
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
        if not self._open and self._slots:
            self._consumed |= _first_consumers(_nodes(result), self._slots)
            for slot in self._consumed:
                self._slots.pop(id(slot.parameter), None)

    def note(self, slot: Slot) -> None:
        """``slot`` is read from Python."""
        (self._open[-1].read if self._open else self._outside).add(slot)

    def stop(self) -> None:
        """Ends the watch."""
        _remove(self._watching)
        self._calls.clear()
        self._open.clear()
        self._outside.clear()
        self._slots.clear()
        self._consumed.clear()

    def prove(self) -> Proof:
        """Ends the watch, and has modules finish what they read unseen."""
        proof = Proof()
        for slot, number in self._consumed.items():
            inside = [c for c in self._calls if c.first <= number < (c.end or 0)]
            inside.sort(key=lambda c: c.depth, reverse=True)
            if slot in (inside[0].read if inside else self._outside):
                continue
            for call in inside:
                module = call.module()
                # TorchScript's have no hooks; what calls them has.
                if module is not None and not isinstance(module, torch.jit.ScriptModule):
                    proof.finished_at[slot] = call.place
                    self._finish_at(module, slot)
                    break
            else:
                proof.unknown.add(slot)
        self.stop()
        return proof

    def _finish_at(self, module: torch.nn.Module, slot: Slot) -> None:
        entry = self._finished_at.get(id(module))
        if entry is None or entry.module() is not module:
            entry = self._finished_at[id(module)] = _Entry(weakref.ref(module))
        entry.parameters.setdefault(slot, slot.parameter)
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
    parameters: dict[Slot, torch.Tensor] = field(default_factory=dict)


def _finish_at_entry(finished_at: dict[int, _Entry], enter: Enter) -> Any:
    """A handle of the hook that does so; it must not keep the exchange alive."""

    def before(module: torch.nn.Module, _args: Any) -> None:
        # A compiled region finishes at its own entry what it reads.
        if torch.compiler.is_compiling():
            return
        entry = finished_at.get(id(module))
        if entry is not None and entry.module() is module:
            with native.CleanRoom():
                enter(list(entry.parameters.values()))

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


def _first_consumers(made: Iterable[Any], slots: Mapping[int, Slot]) -> dict[Slot, int]:
    """The number of the first node that consumes each parameter, of those that led to ``made``."""
    first: dict[Slot, int] = {}
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
            elif (slot := slots.get(id(variable))) is not None:
                number = node._sequence_nr()
                first[slot] = min(first.get(slot, number), number)
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
