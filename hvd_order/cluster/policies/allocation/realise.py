"""Placements for numbers of workers and servers, with few changes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np

from hvd_order.cluster.model.machines import Amounts
from hvd_order.cluster.model.placement import JobPlacement
from hvd_order.cluster.policies.interface import JobState, View
from hvd_order.cluster.policies.packing import fit_count, pack, take

__all__ = ["Placer", "Target", "realise"]


class Target(NamedTuple):
    """Workers and servers that a job should have."""

    workers: int
    servers: int


class Placer(Protocol):
    """Finds machines, as ``pack`` does."""

    def __call__(
        self, state: JobState, workers: int, free: Amounts, servers: int | None = None
    ) -> JobPlacement | None:
        """As many servers as the workers need, if not told; None if they do not fit."""
        ...


def realise(
    view: View, targets: Mapping[str, Target], place: Placer = pack
) -> dict[str, JobPlacement | None]:
    """Comes as near to the targets as placements can.

    Jobs with less than their target grow, and waiting ones start, in the order of ``targets``.
    Those with more than theirs shrink only where that makes room for others, and a job grows only
    if it ends sooner although it stands still for ``view.resize_s``. What does not fit whole gets
    what fits. If a job then cannot start at all, all are placed anew, largest first, provided that
    this meets all targets.

    Args:
        targets: of all jobs; of 0 workers, or of at least ``Job.least``.
        place: finds machines for a job that starts.
    """
    change = _PlacementChange(view, targets, place)
    change.run()
    return change.placed


class _PlacementChange:
    def __init__(self, view: View, targets: Mapping[str, Target], place: Placer) -> None:
        self._view = view
        self._targets = targets
        self._place = place
        self._free = view.free.copy()
        self.placed: dict[str, JobPlacement | None] = {}
        over = [
            state for name, state in view.running.items()
            if name in targets and _is_over(state, targets[name])
        ]  # fmt: skip
        # The last one shrinks first: that with the most to give.
        self._over = sorted(over, key=lambda s: (self._excess(s), -s.number))

    def _excess(self, state: JobState) -> int:
        assert state.placement is not None
        return state.placement.workers - self._targets[state.job.name].workers

    def run(self) -> None:
        left_out = False
        for name, target in self._targets.items():
            waiting = self._view.waiting.get(name)
            if waiting is not None:
                left_out |= target.workers > 0 and not self._start(waiting, target)
                continue
            state = self._view.running[name]
            assert state.placement is not None
            if target.workers > 0 and not _is_over(state, target):
                present = (state.placement.workers, state.placement.servers)
                if present != tuple(target):
                    self._grow(state, state.placement, target)
        if left_out:
            self._place_anew()

    # ---------------------------------------------------------------------------- one job
    def _start(self, state: JobState, target: Target) -> bool:
        placement = self._place(state, target.workers, self._free, target.servers)
        while placement is None and self._shrink_one():
            placement = self._place(state, target.workers, self._free, target.servers)
        if placement is None:
            placement = self._largest(state, target.workers)
        if placement is None:
            return False
        take(self._free, state, placement)
        self.placed[state.job.name] = placement
        return True

    def _largest(self, state: JobState, below: int) -> JobPlacement | None:
        """Of fewer workers than ``below``."""
        found = None
        low, high = state.job.least - 1, below
        while high - low > 1:
            middle = (low + high) // 2
            placement = self._place(state, middle, self._free)
            if placement is None:
                high = middle
            else:
                low, found = middle, placement
        return found

    def _grow(self, state: JobState, present: JobPlacement, target: Target) -> None:
        if not self._sooner(state, present, target):
            return
        grown = _extended(state, present, target, self._free)
        while grown is None and self._shrink_one():
            grown = _extended(state, present, target, self._free)
        if grown is None:
            low, high = present.workers, target.workers
            while high - low > 1:
                middle = (low + high) // 2
                servers = max(state.job.servers_for(middle), present.servers)
                found = _extended(state, present, Target(middle, servers), self._free)
                if found is None:
                    high = middle
                else:
                    low, grown = middle, found
        if grown is None or not self._sooner(state, present, grown):
            return
        take(self._free, state, present, 1.0)
        take(self._free, state, grown)
        self.placed[state.job.name] = grown

    def _sooner(self, state: JobState, present: JobPlacement, then: JobPlacement | Target) -> bool:
        """Whether it ends sooner, although it stands still first."""
        if isinstance(then, Target):  # the machines are not known yet: no more than now
            workers = then.workers - present.workers
            servers = max(then.servers - present.servers, 0)
            then = JobPlacement.of([*present.parts, (present.parts[0].machine, workers, servers)])
        now_s, job = self._view.now_s, state.job
        left = state.left(now_s)

        def end_s(placement: JobPlacement, begin_s: float) -> float:
            rate = job.samples_per_s(placement)
            return begin_s + left / rate if rate > 0 else math.inf

        present_s = end_s(present, max(state.since_s, now_s))
        return end_s(then, now_s + self._view.resize_s) < present_s * (1 - 1e-12)

    def _shrink_one(self) -> bool:
        """Makes room by one of the jobs that have more than their target."""
        if not self._over:
            return False
        state = self._over.pop()
        assert state.placement is not None
        shrunk = _shrunk(state.placement, self._targets[state.job.name])
        take(self._free, state, state.placement, 1.0)
        if shrunk is not None:
            take(self._free, state, shrunk)
        self.placed[state.job.name] = shrunk
        return True

    # ---------------------------------------------------------------------------- all jobs
    def _place_anew(self) -> None:
        view = self._view
        free = view.free.copy()
        states = {}
        for name in self._targets:
            state = view.running.get(name) or view.waiting[name]
            states[name] = state
            if state.placement is not None:
                take(free, state, state.placement, 1.0)
        whole = view.machines.capacity.sum(axis=0)
        whole[whole <= 0] = 1.0

        def size(name: str) -> float:
            state, target = states[name], self._targets[name]
            amounts = target.workers * state.worker + target.servers * state.server
            return float((amounts / whole).max(initial=0.0))

        placed: dict[str, JobPlacement | None] = {}
        for name in sorted(self._targets, key=size, reverse=True):
            state, target = states[name], self._targets[name]
            placement = None
            if target.workers:
                placement = self._place(state, target.workers, free, target.servers)
                if placement is None:
                    return
                take(free, state, placement)
            if placement != state.placement:
                placed[name] = placement
        self.placed = placed


def _is_over(state: JobState, target: Target) -> bool:
    assert state.placement is not None
    workers, servers = state.placement.workers, state.placement.servers
    return target.workers < workers or (target.workers == workers and target.servers < servers)


def _shrunk(placement: JobPlacement, target: Target) -> JobPlacement | None:
    """Without the parts that hold the fewest workers, so that few machines remain."""
    if target.workers == 0:
        return None
    counts = {part.machine: [part.workers, part.servers] for part in placement.parts}
    excess = placement.workers - target.workers
    for part in sorted(placement.parts, key=lambda p: (p.workers, -p.machine)):
        gone = min(excess, part.workers)
        counts[part.machine][0] -= gone
        excess -= gone
    excess = placement.servers - target.servers
    for part in sorted(placement.parts, key=lambda p: (counts[p.machine][0], -p.machine)):
        gone = min(max(excess, 0), part.servers)
        counts[part.machine][1] -= gone
        excess -= gone
    return JobPlacement.of([(machine, w, s) for machine, (w, s) in counts.items()])


def _extended(
    state: JobState, present: JobPlacement, target: Target, free: Amounts
) -> JobPlacement | None:
    """With more beside what is there, then on the machines with the most room."""
    parts: list[tuple[int, int, int]] = list(present.parts)
    rest = free.copy()
    used = [part.machine for part in present.parts]
    for demand, more, is_worker in (
        (state.worker, target.workers - present.workers, True),
        (state.server, target.servers - present.servers, False),
    ):
        if more <= 0:
            continue
        room = fit_count(rest, demand)
        if room.sum() < more:
            return None
        others = [int(m) for m in np.argsort(-room, kind="stable") if int(m) not in used]
        for machine in used + others:
            count = int(min(room[machine], more))
            if count > 0:
                parts.append((machine, count, 0) if is_worker else (machine, 0, count))
                rest[machine] -= count * demand
                more -= count
                if machine not in used:
                    used.append(machine)
            if more == 0:
                break
    return JobPlacement.of(parts)
