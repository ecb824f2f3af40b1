"""How many workers fit if they are given out one by one."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

from hvd_order.cluster.model.machines import Amounts
from hvd_order.cluster.policies.interface import JobState
from hvd_order.cluster.policies.packing import pack, take

__all__ = ["Filling"]


class Filling:
    """Machines that fill up. Tells how many workers can be had; where they will run is decided
    later, by those that know where they run now.

    What is added goes to the machine with the least room that holds it, so that what needs much
    room finds it later. Numbers of Python, not arrays: one machine is looked at, as a rule.
    """

    def __init__(self, free: Amounts, states: Sequence[JobState]) -> None:
        self._free = free.copy()
        self._rows: list[list[float]] = free.tolist()
        least = np.min([state.worker for state in states], axis=0) if states else free[0]
        self._least: list[float] = least.tolist()  # without it a machine is full
        self._by_room = sorted((sum(row), machine) for machine, row in enumerate(self._rows))
        self._last: dict[int, int] = {}
        self._amounts: dict[tuple[int, int, int], list[float]] = {}

    def first(self, state: JobState, workers: int, servers: int) -> bool:
        """Takes a job's first workers, all at once. Returns whether they fit."""
        placement = pack(state, workers, self._free, servers)
        if placement is None:
            return False
        take(self._free, state, placement)
        for part in placement.parts:
            self._set(part.machine, self._free[part.machine].tolist())
            self._last[state.number] = part.machine
        return True

    def more(self, state: JobState, workers: int, servers: int) -> bool:
        """Takes more of a job, on one machine if it fits so. Returns whether it fits."""
        key = (state.number, workers, servers)
        amounts = self._amounts.get(key)
        if amounts is None:
            amounts = (workers * state.worker + servers * state.server).tolist()
            self._amounts[key] = amounts
        machine = self._last.get(state.number, 0)
        if not _fits(self._rows[machine], amounts):
            found = next((m for _, m in self._by_room if _fits(self._rows[m], amounts)), None)
            if found is None:
                return workers + servers > 1 and self.first(state, workers, servers)
            machine = self._last[state.number] = found
        row = [has - needs for has, needs in zip(self._rows[machine], amounts, strict=True)]
        self._set(machine, row)
        self._free[machine] = row
        return True

    def _set(self, machine: int, row: list[float]) -> None:
        place = (sum(self._rows[machine]), machine)
        at = bisect.bisect_left(self._by_room, place)
        if at < len(self._by_room) and self._by_room[at] == place:
            del self._by_room[at]
        self._rows[machine] = row
        if _fits(row, self._least):
            bisect.insort(self._by_room, (sum(row), machine))


def _fits(row: list[float], amounts: list[float]) -> bool:
    for has, needs in zip(row, amounts, strict=True):  # noqa: SIM110 - all() takes twice as long
        if has < needs - 1e-9:
            return False
    return True
