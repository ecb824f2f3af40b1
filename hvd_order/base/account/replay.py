"""What a step would be without a late rank, or on a faster link: its transfers, replayed.

The link is a queue: of the slices that are ready it takes the most urgent, or, where order is not
by need, the one that it took first. Each takes as long as it did, and the rank computes as long as
it did between its waits. So what a late rank hides comes to light: where its gradients come slowly,
transfers pass meanwhile, which have to be waited for once they come soon.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from hvd_order.base.account.exposed import SlicesOfStep, WaitedSlices
from hvd_order.base.account.step_parts import StepMarks

__all__: list[str] = []


def saved_ns(
    marks: StepMarks,
    times: SlicesOfStep,
    slices: WaitedSlices,
    ready: Sequence[int],
    by_need: bool,
    duration: float = 1.0,
) -> float:
    """Returns by how much the step of this rank would be shorter.

    Args:
        ready: by slice, when all ranks would have it ready; of second halves it means nothing.
        by_need: of the slices that are ready, the most urgent goes first; otherwise the one that
            went first.
        duration: of each transfer, over its present one.
    """
    ends = replayed(times, slices, ready, by_need, duration)
    saved = 0.0
    for begin, end, final in sorted(_reads(marks, times, slices)):
        if final in ends:
            saved = end - max(begin - saved, ends[final])
    return saved


def _reads(
    marks: StepMarks, times: SlicesOfStep, slices: WaitedSlices
) -> Iterator[tuple[int, int, int]]:
    """Begin and end of the wait for each slice, which may be at once.

    Reads that found their slice there are not recorded: they are spread over the forward pass.
    """
    waited = set()
    for begin, end, tensor in marks.waits:
        ends = slices.last[tensor] if tensor < len(slices.last) else ()
        final = max(ends, key=times.done.__getitem__, default=None)
        if final is not None and times.ready[final] < end:
            waited.add(final)
            yield begin, end, final
    if not marks.read_ns:
        return
    waits = sorted(each for each in marks.waits if each[0] >= marks.read_ns)
    computes = marks.end_ns - marks.read_ns - sum(end - begin for begin, end, _ in waits)
    finals = sorted({final for ends in slices.last for final in ends})
    passed = 0  # of the waits, at the present read
    for at, final in enumerate(finals):
        read = marks.read_ns + computes * at // len(finals) + passed
        while waits and waits[0][0] <= read:
            begin, end, _ = waits.pop(0)
            passed += end - begin
            read += end - begin
        if final not in waited:
            yield read, read, final


def replayed(
    times: SlicesOfStep,
    slices: WaitedSlices,
    ready: Sequence[int],
    by_need: bool,
    duration: float = 1.0,
) -> dict[int, float]:
    """Returns when the transfer of each slice would have ended; see `saved_ns`."""
    order = sorted(
        (number for number, issued in enumerate(times.issued) if issued),
        key=times.done.__getitem__,
    )
    place = {number: number if by_need else at for at, number in enumerate(order)}
    at_place = {at: number for number, at in place.items()}
    follows: dict[int, list[int]] = {}  # second halves
    lacks: dict[int, int] = {}
    took: dict[int, float] = {}
    before = 0
    for number in order:
        firsts = [each for each in slices.first[number] if each != number and times.issued[each]]
        could_begin = max((times.done[each] for each in firsts), default=times.ready_last[number])
        took[number] = max(0, times.done[number] - max(before, times.issued[number], could_begin))
        before = times.done[number]
        lacks[number] = len(firsts)
        for each in firsts:
            follows.setdefault(each, []).append(number)
    coming = [(float(ready[number]), number) for number in order if not lacks[number]]
    heapq.heapify(coming)
    there: list[int] = []  # places of slices that are ready
    ends: dict[int, float] = {}
    now = 0.0
    while coming or there:
        if not there:
            now = max(now, coming[0][0])
        while coming and coming[0][0] <= now:
            heapq.heappush(there, place[heapq.heappop(coming)[1]])
        number = at_place[heapq.heappop(there)]
        now = ends[number] = now + duration * took[number]
        for each in follows.get(number, ()):
            lacks[each] -= 1
            if lacks[each] == 0:
                heapq.heappush(coming, (now, each))
    return ends
