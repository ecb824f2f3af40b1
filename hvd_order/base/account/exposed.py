"""Why a rank's readers waited in one step: late ranks, slices before theirs, or the link."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from hvd_order.base.account.wait_split import split_wait

__all__: list[str] = []


@dataclass(frozen=True)
class WaitedSlices:
    """What readers of each tensor wait for.

    Attributes:
        last: by tensor, the slices that end its exchange.
        first: by slice, the slices that begin it: itself, or where sums travel in halves the
            reduce-scatters that come before it.
        names: by slice.
    """

    last: Sequence[Sequence[int]]
    first: Sequence[Sequence[int]]
    names: Sequence[str]


@dataclass(frozen=True)
class SlicesOfStep:
    """Times of the slices of one step on one rank, ns of its clock, by slice; 0: not known.

    Attributes:
        ready, issued, done: on this rank.
        ready_last: when the last rank had it ready; ``last`` is the place of that rank.
        ready_second: when the last of the other ranks had it ready.
    """

    ready: Sequence[int]
    issued: Sequence[int]
    done: Sequence[int]
    ready_last: Sequence[int]
    last: Sequence[int]
    ready_second: Sequence[int]


@dataclass
class Exposed:
    """Exposed communication of one step on one rank, ns: ``late + queue + transfer``.

    Attributes:
        inversion: of ``queue``, while less urgent slices travelled that were sent after this one
            was ready everywhere.
        late_of: of ``late``, by the place of the rank that was last.
    """

    late: float = 0.0
    queue: float = 0.0
    transfer: float = 0.0
    inversion: float = 0.0
    late_of: Counter[int] = field(default_factory=Counter)


def explain(
    waits: Iterable[tuple[int, int, int]], times: SlicesOfStep, slices: WaitedSlices
) -> Exposed:
    """Explains the waits (begin, end, tensor) of one step, which do not overlap.

    A wait for a transfer whose times are not known counts as transfer.
    """
    result = Exposed()
    for begin, end, tensor in waits:
        ends = slices.last[tensor] if tensor < len(slices.last) else ()
        final = max(ends, key=times.done.__getitem__, default=None)
        # The times are of the last transfer; a wait that ended before was for an earlier one.
        if final is None or not times.issued[final] or times.ready[final] >= end:
            result.transfer += max(0, end - begin)
            continue
        first = max(slices.first[final], key=times.ready_last.__getitem__)
        middle = end if first == final else min(max(begin, times.done[first]), end)
        _add(result, begin, middle, first, times)
        if middle < end:  # the second half: no rank computes anything for it
            half = split_wait(middle, end, middle, times.issued[final])
            result.queue += half.queue
            result.transfer += half.transfer
    return result


def _add(result: Exposed, begin: int, end: int, of: int, times: SlicesOfStep) -> None:
    parts = split_wait(begin, end, times.ready_last[of], times.issued[of])
    result.late += parts.late
    result.queue += parts.queue
    result.transfer += parts.transfer
    if parts.late:
        result.late_of[times.last[of]] += int(parts.late)
    if parts.queue:
        sent = end - parts.transfer
        ready = sent - parts.queue
        # Less urgent slices have higher numbers.
        result.inversion += sum(
            max(0.0, min(done, sent) - max(issued, ready))
            for issued, done in zip(times.issued[of + 1 :], times.done[of + 1 :], strict=True)
            if ready <= issued < sent
        )
        result.inversion = min(result.inversion, result.queue)


def late_layer(ready: Sequence[int], others: Sequence[int], share: float = 0.7) -> int | None:
    """Returns the slice from which on a rank is late, if one step of its backward pass explains it.

    Args:
        ready: by slice, when this rank had it ready; 0: not known.
        others: when the last of the other ranks had.
        share: of the whole delay, which must arise between two slices that follow each other.
    """
    by_time = sorted(
        (r, r - o, place) for place, (r, o) in enumerate(zip(ready, others, strict=True)) if r and o
    )
    if len(by_time) < 3:
        return None
    whole = by_time[-1][1] - by_time[0][1]
    jumps = [(after[1] - before[1], after[2]) for before, after in pairwise(by_time)]
    most, place = max(jumps)
    return place if whole > 0 and most >= share * whole else None
