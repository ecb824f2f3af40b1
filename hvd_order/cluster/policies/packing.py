"""Finds machines for a job's workers and servers. What several policies share."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hvd_order.cluster.model.machines import Amounts
from hvd_order.cluster.model.placement import Placement
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


def pack(state: JobState, workers: int, free: Amounts) -> Placement | None:
    """Places workers, and as many servers as they need, on as few machines as possible.

    One machine if all fit: the one with the least left over. Else the machines that hold the most
    workers, then servers beside them and on others.

    Returns:
        None if they do not fit.
    """
    job = state.job
    servers = job.servers_for(workers)
    whole = workers * state.worker + servers * state.server
    fits = np.flatnonzero((free >= whole - 1e-9).all(axis=1))
    if len(fits):
        left = (free[fits] - whole).sum(axis=1)
        return Placement.of([(int(fits[left.argmin()]), workers, servers)])
    room = fit_count(free, state.worker)
    if room.sum() < workers:
        return None
    parts: list[tuple[int, int, int]] = []
    to_go = workers
    rest = free
    if servers:
        rest = free.copy()
    for machine in np.argsort(-room, kind="stable"):
        count = int(min(room[machine], to_go))
        if count <= 0:
            break
        parts.append((int(machine), count, 0))
        if servers:
            rest[machine] -= count * state.worker
        to_go -= count
    if servers:
        used = [machine for machine, *_ in parts]
        room = fit_count(rest, state.server)
        others = [int(m) for m in np.argsort(-room, kind="stable") if int(m) not in set(used)]
        for machine in used + others:
            count = int(min(room[machine], servers))
            if count > 0:
                parts.append((machine, 0, count))
                servers -= count
            if servers == 0:
                break
        if servers:
            return None
    return Placement.of(parts)


def take(free: Amounts, state: JobState, placement: Placement, sign: float = -1.0) -> None:
    """Takes the amounts of a placement from ``free``, in place; a sign of 1 gives them back."""
    machines = [part.machine for part in placement.parts]
    free[machines] += sign * state.usage(placement)
