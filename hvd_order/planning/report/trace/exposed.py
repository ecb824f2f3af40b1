"""Exposed communication of a timeline: each wait, its cause, and what was sent meanwhile. Pure.

docs/guides/timeline.md has the definitions of late, queue and transfer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from hvd_order.base.account.wait_split import WaitParts, split_wait
from hvd_order.planning.report.trace_file import RankTimeline, TracedJob, TracedSlice, TracedWait

__all__ = ["ExposedWait", "Meanwhile", "exposed_waits", "layer_of"]

_Key = tuple[int, int, int]  # (model, step, slice)
_FIRST_HALF, _SECOND_HALF = "sum of ", "parts of "


@dataclass(frozen=True)
class Meanwhile:
    """A slice that was in flight while another one, which a reader waited for, was queued.

    Attributes:
        us: how long.
        inversion: it is less urgent than the slice that waited.
    """

    name: str
    us: float
    inversion: bool


@dataclass(frozen=True)
class ExposedWait:
    """A wait of a reader.

    Attributes:
        rank: the rank that waits.
        parts: in microseconds; None: the trace does not say for which slice.
        late_rank: the rank that was last to have the gradient, if ``parts.late``.
        blocked_by: the slice that came last, of those that the wait needed.
        meanwhile: what was sent during ``parts.queue``, the longest first.
    """

    rank: int
    wait: TracedWait
    parts: WaitParts | None
    late_rank: int = -1
    blocked_by: str = ""
    meanwhile: tuple[Meanwhile, ...] = ()

    @property
    def us(self) -> float:
        """Length of the wait."""
        return self.wait.duration_us


def layer_of(parameter: str) -> str:
    """Returns the layer of a parameter: its name without the last part."""
    return parameter.rpartition(".")[0] or parameter


@dataclass(frozen=True)
class _Times:
    """Of one slice in one step, on the clock of the trace.

    Attributes:
        ready_us: by rank.
        issued_us: when the last rank handed it to the transport.
    """

    ready_us: Mapping[int, float]
    issued_us: float


def exposed_waits(job: TracedJob) -> list[ExposedWait]:
    """Returns all waits of all ranks, in order of their begins on each rank."""
    times = _times(job)
    return [
        _exposed(timeline, wait, times)
        for timeline in job.ranks.values()
        for wait in timeline.waits
    ]


def _times(job: TracedJob) -> dict[_Key, _Times]:
    ready: dict[_Key, dict[int, float]] = defaultdict(dict)
    issued: dict[_Key, float] = {}
    for rank, timeline in job.ranks.items():
        for queued in timeline.queued:
            key = queued.model, queued.step, queued.slice
            ready[key][rank] = queued.begin_us
            issued[key] = max(queued.end_us, issued.get(key, queued.end_us))
    return {key: _Times(of_ranks, issued[key]) for key, of_ranks in ready.items()}


def _exposed(timeline: RankTimeline, wait: TracedWait, times: Mapping[_Key, _Times]) -> ExposedWait:
    awaited = [
        each for each in timeline.transfers
        if (each.model, each.step) == (wait.model, wait.step) and each.slice in wait.slices
    ]  # fmt: skip
    if not awaited:
        return ExposedWait(timeline.rank, wait, None)
    last = max(awaited, key=lambda each: each.end_us)
    first = _first_half(timeline, last)
    of_first = times[first.model, first.step, first.slice]
    late_rank = max(of_first.ready_us, key=lambda rank: of_first.ready_us[rank])
    # A transfer that has ended had begun everywhere, whatever the clocks' error.
    issued_us = min(of_first.issued_us, first.end_us)
    ready_us = of_first.ready_us[late_rank]
    parts = split_wait(wait.begin_us, wait.end_us, ready_us, issued_us)
    queued = [(max(wait.begin_us, ready_us), min(issued_us, wait.end_us))]
    if first is not last:  # the second half waits for its turn once more
        again = max(first.end_us, wait.begin_us), min(last.begin_us, wait.end_us)
        more_us = max(0.0, again[1] - again[0])
        parts = replace(parts, queue=parts.queue + more_us, transfer=parts.transfer - more_us)
        queued.append(again)
    return ExposedWait(
        timeline.rank,
        wait,
        parts,
        late_rank if parts.late > 0 else -1,
        last.name,
        tuple(_meanwhile(timeline, last, queued)),
    )


def _first_half(timeline: RankTimeline, last: TracedSlice) -> TracedSlice:
    """Where the all-reduce is split: the half of the gradient before that of the sum."""
    if not last.name.startswith(_SECOND_HALF):
        return last
    name = _FIRST_HALF + last.name.removeprefix(_SECOND_HALF)
    halves = [
        each for each in timeline.transfers
        if each.name == name and (each.model, each.step) == (last.model, last.step)
    ]  # fmt: skip
    return halves[0] if halves else last


def _meanwhile(
    timeline: RankTimeline, awaited: TracedSlice, queued: Iterable[tuple[float, float]]
) -> list[Meanwhile]:
    found = []
    for begin_us, end_us in queued:
        for each in timeline.transfers:
            us = min(each.end_us, end_us) - max(each.begin_us, begin_us)
            if us > 0 and each is not awaited:
                less_urgent = each.model != awaited.model or each.priority > awaited.priority
                found.append(Meanwhile(each.name, us, less_urgent))
    return sorted(found, key=lambda each: -each.us)
