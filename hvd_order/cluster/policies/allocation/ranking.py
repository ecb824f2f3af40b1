"""Who runs, by rank: what policies share that stop jobs for others but do not resize them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from hvd_order.cluster.model.machines import Amounts
from hvd_order.cluster.model.placement import JobPlacement
from hvd_order.cluster.policies.interface import JobState, View
from hvd_order.cluster.policies.packing import pack, take

__all__ = ["by_rank"]


def by_rank(
    view: View, ranked: Sequence[JobState], workers: Callable[[JobState], int]
) -> dict[str, JobPlacement | None]:
    """Places jobs in order of rank. A waiting job takes what is free. If that is not enough, jobs
    of lower rank stop for it, the lowest first, and none that it does not need. Jobs that do not
    fit are passed over.

    Running jobs keep their places unless they stop; those that are not ranked are not touched.

    Args:
        ranked: highest rank first.
        workers: of a waiting job.
    """
    if all(state.placement is not None for state in ranked):
        return {}
    return _JobRanks(view, ranked, workers).place()


class _JobRanks:
    def __init__(
        self, view: View, ranked: Sequence[JobState], workers: Callable[[JobState], int]
    ) -> None:
        self._ranked = ranked
        self._workers = workers
        self._free = view.free.copy()
        self._placed: dict[str, JobPlacement | None] = {}
        # The parts of all running jobs as arrays, by rank.
        parts = [
            (rank, *part)
            for rank, state in enumerate(ranked) if state.placement is not None
            for part in state.placement.parts
        ]  # fmt: skip
        table: NDArray[np.int64] = np.array(parts, dtype=np.int64).reshape(-1, 4)
        self._rank, self._machine = table[:, 0], table[:, 1]
        demands = np.array([(state.worker, state.server) for state in ranked])
        self._usage: Amounts = (table[:, 2:, None] * demands[self._rank]).sum(axis=1)
        self._runs: NDArray[np.bool_] = np.ones(len(table), dtype=bool)
        # What would be free without the ranks that were not looked at so far.
        self._reachable = view.free.copy()
        np.add.at(self._reachable, self._machine, self._usage)

    def place(self) -> dict[str, JobPlacement | None]:
        hopeless: set[tuple[bytes, bytes, int, int]] = set()
        for rank, state in enumerate(self._ranked):
            if state.placement is not None and state.job.name not in self._placed:
                here = slice(*np.searchsorted(self._rank, (rank, rank + 1)))
                self._reachable[self._machine[here]] -= self._usage[here]
                continue
            workers = self._workers(state)
            servers = state.job.servers_for(workers)
            # What is reachable only shrinks: who did not fit before does not fit now.
            shape = (state.worker.tobytes(), state.server.tobytes(), workers, servers)
            if shape in hopeless:
                continue
            whole = workers * state.worker + servers * state.server
            placement = None
            if (whole <= self._reachable.sum(axis=0) + 1e-9).all():
                placement = self._find(rank, state, workers)
            if placement is None:
                hopeless.add(shape)
                continue
            take(self._free, state, placement)
            take(self._reachable, state, placement)
            if placement == state.placement:
                del self._placed[state.job.name]
            else:
                self._placed[state.job.name] = placement
        return self._placed

    def _find(self, rank: int, state: JobState, workers: int) -> JobPlacement | None:
        if state.placement is not None and _fits(self._free, state):
            return state.placement
        placement = pack(state, workers, self._free)
        if placement is not None or pack(state, workers, self._reachable) is None:
            return placement
        # The fewest of the lowest ranks that must stop. All below it are enough, as was just seen.
        low, high = rank + 1, len(self._ranked)
        while high - low > 1:
            middle = (low + high) // 2
            if pack(state, workers, self._without(middle)) is None:
                high = middle
            else:
                low = middle
        free = self._without(low)
        placement = pack(state, workers, free)
        if placement is None:
            return None
        take(free, state, placement)
        below = self._runs & (self._rank >= low)
        for lower in dict.fromkeys(self._rank[below].tolist()):
            victim = self._ranked[lower]
            if _fits(free, victim):
                assert victim.placement is not None
                take(free, victim, victim.placement)
            else:
                self._placed[victim.job.name] = None
                self._runs &= self._rank != lower
        take(free, state, placement, 1.0)
        self._free = free
        return placement

    def _without(self, rank: int) -> Amounts:
        """What is free if all from this rank on stop."""
        free = self._free.copy()
        below = self._runs & (self._rank >= rank)
        np.add.at(free, self._machine[below], self._usage[below])
        return free


def _fits(free: Amounts, state: JobState) -> bool:
    """Whether its present placement fits."""
    assert state.placement is not None
    machines = [part.machine for part in state.placement.parts]
    return bool((free[machines] >= state.usage(state.placement) - 1e-9).all())
