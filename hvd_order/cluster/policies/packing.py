"""Finds machines for a job's workers and servers. What several policies share."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hvd_order.cluster.model.machines import Amounts
from hvd_order.cluster.model.placement import JobPlacement
from hvd_order.cluster.policies.interface import JobState

__all__ = ["fit_count", "pack", "take"]


def fit_count(free: Amounts, demand: Amounts) -> NDArray[np.int64]:
    """How many processes of a demand fit on each machine; a demand of nothing fits often."""
    needed = demand > 0
    if not needed.any():
        return np.full(len(free), 1 << 30, dtype=np.int64)
    # A sum of floats may lack the last bit of what it should be.
    counts: NDArray[np.int64] = np.floor(
        (free[:, needed] / demand[needed]).min(axis=1) + 1e-9
    ).astype(np.int64)
    return counts


def pack(
    state: JobState, workers: int, free: Amounts, servers: int | None = None
) -> JobPlacement | None:
    """Places workers, and as many servers as they need, on as few machines as possible.

    One machine if all fit: the one with the least left over. Else the machines that hold the most
    workers, then servers beside them and on others; or servers first, where they fit only so.

    Args:
        servers: None: as few as the workers need.

    Returns:
        None if they do not fit.
    """
    if servers is None:
        servers = state.job.servers_for(workers)
    whole = workers * state.worker + servers * state.server
    fits = np.flatnonzero((free >= whole - 1e-9).all(axis=1))
    if len(fits):
        left = (free[fits] - whole).sum(axis=1)
        return JobPlacement.of([(int(fits[left.argmin()]), workers, servers)])
    if fit_count(free, state.worker).sum() < workers:
        return None
    parts = _on_several(free, state.worker, workers, state.server, servers)
    if parts is None and servers:
        turned = _on_several(free, state.server, servers, state.worker, workers)
        parts = None if turned is None else [(m, count, first) for m, first, count in turned]
    return None if parts is None else JobPlacement.of(parts)


def _on_several(
    free: Amounts, first: Amounts, count: int, second: Amounts, second_count: int
) -> list[tuple[int, int, int]] | None:
    """Processes of the first demand where the most fit, those of the second beside them if they
    can be. Returns (machine, of the first, of the second).
    """
    room = fit_count(free, first)
    if room.sum() < count:
        return None
    parts: list[tuple[int, int, int]] = []
    rest = free.copy() if second_count else free
    for machine in np.argsort(-room, kind="stable"):
        here = int(min(room[machine], count))
        if here <= 0:
            break
        parts.append((int(machine), here, 0))
        if second_count:
            rest[machine] -= here * first
        count -= here
    if second_count:
        used = [machine for machine, *_ in parts]
        room = fit_count(rest, second)
        others = [int(m) for m in np.argsort(-room, kind="stable") if int(m) not in set(used)]
        for machine in used + others:
            here = int(min(room[machine], second_count))
            if here > 0:
                parts.append((machine, 0, here))
                second_count -= here
            if second_count == 0:
                break
        if second_count:
            return None
    return parts


def take(free: Amounts, state: JobState, placement: JobPlacement, sign: float = -1.0) -> None:
    """Takes the amounts of a placement from ``free``, in place; a sign of 1 gives them back."""
    machines = [part.machine for part in placement.parts]
    free[machines] += sign * state.usage(placement)
