"""Plain tensors of parameters' memory that the program keeps: ``best = model.state_dict()``.

A use count tells that something shares a parameter's memory, not what. If it is nothing but plain
tensors in dicts, lists and tuples, their readers can be guarded as the parameter's readers are: the
update waits, and whoever uses such a tensor finds it up to date, as in plain PyTorch. Everything
else (an array made from such a tensor, a view in a graph) is counted: then the update cannot wait.

The search looks at all objects that Python's garbage collector knows, which takes 0.2 s where there
are a million. So it runs only when something new shares a parameter's memory, at most once in 16
steps, and more and more rarely while it finds no explanation.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

from hvd_order._native import _torch as native
from hvd_order.torch.parameters.entry import ParameterEntry
from hvd_order.torch.parameters.read_guard import PendingTensor

__all__: list[str] = []

_STEPS_BETWEEN = 16
_MOST_STEPS_BETWEEN = 1024


class KeptTensors:
    """The dicts, lists and tuples in which the program keeps tensors of one model's memory."""

    def __init__(self) -> None:
        """Knows of none."""
        # Also held by the program, or `release` lets go of them. Python's collector sees this list.
        self._containers: list[Any] = []
        self._positions: dict[ParameterEntry, list[tuple[int, str | int]]] = {}
        self._unexplained: frozenset[ParameterEntry] = frozenset()
        self._steps = self._wait = _STEPS_BETWEEN  # since the last search, and until one

    def release(self) -> None:
        """Lets go of containers that the program has dropped. Once a step, first of all."""
        self._steps += 1
        if any(native.held_alone(self._containers)):
            self._containers, self._positions = [], {}
            self._steps = self._wait = _STEPS_BETWEEN

    def guard(self, shared: Sequence[ParameterEntry]) -> frozenset[ParameterEntry]:
        """Sets ``kept`` of the entries whose memory is shared with plain tensors alone.

        Returns:
            The others.
        """
        unexplained = self._guard_known(shared)
        if unexplained and self._may_search(unexplained):
            self._search(shared)
            before, unexplained = unexplained, self._guard_known(shared)
            found = len(unexplained) < len(before)
            self._wait = _STEPS_BETWEEN if found else min(2 * self._wait, _MOST_STEPS_BETWEEN)
        self._unexplained = unexplained
        return unexplained

    def _guard_known(self, shared: Sequence[ParameterEntry]) -> frozenset[ParameterEntry]:
        others = []
        for entry in shared:
            positions = self._positions.get(entry)
            kept = positions and native.kept_tensors(
                entry.parameter, self._containers, positions, PendingTensor
            )
            if kept:
                entry.kept = kept
            else:
                others.append(entry)
        return frozenset(others)

    def _may_search(self, unexplained: frozenset[ParameterEntry]) -> bool:
        is_new = not unexplained <= self._unexplained
        return self._steps >= (_STEPS_BETWEEN if is_new else self._wait)

    def _search(self, shared: Sequence[ParameterEntry]) -> None:
        for entry in shared:
            entry.kept = ()
        self._steps = 0
        self._containers, self._positions = [], {}
        places: dict[int, int] = {}
        parameters = [entry.parameter for entry in shared]
        for place, container, key in native.find_kept(gc.get_objects(), parameters, PendingTensor):
            if id(container) not in places:
                places[id(container)] = len(self._containers)
                self._containers.append(container)
            self._positions.setdefault(shared[place], []).append((places[id(container)], key))
