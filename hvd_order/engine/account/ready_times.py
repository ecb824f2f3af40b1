"""When the last rank had each slice ready: two reductions of the ranks' own times."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from hvd_order.base.account.clock_offset import ClockOffset, Passage, clock_offset
from hvd_order.engine.job import group_collectives

__all__: list[str] = []

_PASSAGES = 3  # the first brings the ranks together
_PLACE_BITS = 16
_PLACES = 1 << _PLACE_BITS
_MAX = dist.ReduceOp.MAX


def compare_clocks(
    group: dist.ProcessGroup, before: ClockOffset | None, count: int
) -> tuple[ClockOffset, bool]:
    """Compares this rank's clock with rank 0's. Collective.

    Args:
        count: of what will be compared next.

    Returns:
        The offset, and whether all ranks have the same count: Gloo ends a process that is sent
        more than it expects.
    """
    mine: list[Passage] = []
    counts = torch.tensor([count, -count])
    for _ in range(_PASSAGES):
        entered = time.monotonic_ns()
        group_collectives.all_reduce(counts, group, _MAX)
        mine.append((entered, time.monotonic_ns()))
    most, least = counts[0].item(), -counts[1].item()
    of_rank_0 = torch.tensor(mine)
    group_collectives.broadcast(of_rank_0, 0, group)
    return clock_offset(mine, [(a, b) for a, b in of_rank_0.tolist()], before), most == least


def last_ready(
    ready: Sequence[int], offset: ClockOffset, place: int, group: dist.ProcessGroup
) -> tuple[list[int], list[int], list[int]]:
    """Returns when the last rank had each slice ready, which one it was, and when the last of the
    other ranks had. Collective: all ranks pass as many slices.

    Args:
        ready: ns of this rank's clock, by slice; 0: not known.
        offset: of this rank's clock.
        place: of this rank.

    Returns:
        Times in ns of this rank's clock, to a microsecond; 0 where no rank knows.
    """
    if not ready:
        return [], [], []
    shift = round(offset.ns)
    # One number holds time and rank, so that one maximum finds both.
    mine = torch.tensor(
        [(at - shift) // 1000 * _PLACES + place if at else 0 for at in ready], dtype=torch.int64
    )
    latest = mine.clone()
    group_collectives.all_reduce(latest, group, _MAX)
    second = torch.where(latest == mine, torch.zeros_like(mine), mine)
    group_collectives.all_reduce(second, group, _MAX)
    return (
        [_own_ns(value, shift) for value in latest.tolist()],
        [value % _PLACES for value in latest.tolist()],
        [_own_ns(value, shift) for value in second.tolist()],
    )


def _own_ns(value: int, shift: int) -> int:
    return (value >> _PLACE_BITS) * 1000 + shift if value else 0
