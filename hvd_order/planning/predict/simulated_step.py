"""One step of a simulation: what was computed and sent, and what waited for what."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hvd_order.planning.graph.graph import Phase
from hvd_order.planning.predict.simulate import OpTimes, Simulated, SliceTimes
from hvd_order.planning.steps.efficiency import OverlapEfficiency, Span, busy_s, overlap_of

__all__ = [
    "RECORDED",
    "Busy",
    "Idle",
    "Sent",
    "SimulatedStep",
    "StepTimes",
    "Wait",
    "step_of",
    "times_of",
]

RECORDED = 3
"""Number of steps to record for `times_of`."""

_NOTHING_S = 1e-9  # rounding
_HELD_UP = "something is ready: agreement, latency, or held back for what is more urgent"


@dataclass(frozen=True)
class Busy:
    """A busy interval of computation; seconds from the start of the step."""

    name: str
    phase: Phase
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Sent:
    """A slice that was ready or in flight in the step; seconds from the step's start.

    Attributes:
        place: number of the slice in consumption order.
        is_old: whether the slice belongs to the previous step, whose update this step awaits.
    """

    name: str
    place: int
    size_bytes: int
    ready_s: float
    started_s: float
    ended_s: float
    is_old: bool


@dataclass(frozen=True)
class Wait:
    """Computation waited for a slice.

    Attributes:
        waiting: the op, or "the next step".
        awaited: the slice.
        behind: tensors that the link carried while the slice was ready, and the time of each.
    """

    begin_s: float
    end_s: float
    waiting: str
    awaited: str
    behind: tuple[tuple[str, float], ...]

    @property
    def length_s(self) -> float:
        """How long."""
        return self.end_s - self.begin_s


@dataclass(frozen=True)
class Idle:
    """The link was idle.

    Attributes:
        cause: why.
        until: the next slice in this step, if any.
    """

    begin_s: float
    end_s: float
    cause: str
    until: str | None

    @property
    def length_s(self) -> float:
        """How long."""
        return self.end_s - self.begin_s


@dataclass(frozen=True)
class SimulatedStep:
    """One steady step of rank 0.

    Attributes:
        title: description of the way of sending.
        step_s: time from its start to the start of the next step.
        busy: ops and updates.
        links: busy intervals, by name of the link.
        sent, waits, idle: in order of time.
        overlap: E and S.
    """

    title: str
    step_s: float
    busy: list[Busy]
    links: dict[str, list[tuple[float, float]]]
    sent: list[Sent]
    waits: list[Wait]
    idle: list[Idle]
    overlap: OverlapEfficiency

    @property
    def compute_s(self) -> float:
        """Total time of computation."""
        return busy_s((each.begin_s, each.end_s) for each in self.busy)

    @property
    def wait_s(self) -> float:
        """Total time that computation waited for transfers."""
        return math.fsum(wait.length_s for wait in self.waits)

    @property
    def idle_s(self) -> float:
        """Total idle time of the link."""
        return math.fsum(idle.length_s for idle in self.idle)


@dataclass(frozen=True)
class StepTimes:
    """What happened in one step of rank 0; times in seconds since the start of the simulation.

    Attributes:
        ops: of the step.
        updates: of any step, begin and end.
        links: busy intervals of any step, by name of the link.
        before, mine: the slices of the step before, which this step awaits, and of this one.
    """

    begin_s: float
    end_s: float
    ops: Sequence[OpTimes]
    updates: Sequence[tuple[float, float]]
    links: Mapping[str, Sequence[tuple[float, float]]]
    before: Sequence[SliceTimes]
    mine: Sequence[SliceTimes]


def times_of(result: Simulated) -> StepTimes:
    """The last recorded step but one, of ``RECORDED``: its transfers end in the last."""
    begin_s, end_s = result.step_starts_s()[-RECORDED:][:2]
    updates = [(update.start_s, update.end_s) for update in result.updates()]
    before, mine = result.slices()[-RECORDED:][:2]
    links = {"link": result.link_busy()}
    return StepTimes(begin_s, end_s, result.ops()[-2], updates, links, before, mine)


def step_of(
    times: StepTimes, title: str, phases: dict[str, Phase], awaits_all: bool
) -> SimulatedStep:
    """Explains a step.

    Args:
        title: description of the way of sending.
        phases: phase of each op.
        awaits_all: whether the step ends when all of its gradients have arrived.
    """
    begin_s, end_s = times.begin_s, times.end_s
    step_s = end_s - begin_s
    ops, before, mine = times.ops, times.before, times.mine
    busy = [
        Busy(op.name, phases[op.name], op.start_s - begin_s, op.end_s - begin_s)
        for op in ops
        if op.end_s > op.start_s
    ]
    busy += [
        Busy("update", "update", start, end)
        for start, end in _clipped(times.updates, begin_s, end_s)
    ]
    busy.sort(key=lambda each: each.begin_s)
    links = {
        name: list(_clipped(intervals, begin_s, end_s)) for name, intervals in times.links.items()
    }
    sent = [
        Sent(s.name, i, s.size_bytes, s.ready_s - begin_s, s.started_s - begin_s,
             s.finished_s - begin_s, old)
        for slices, old in ((before, True), (mine, False))
        for i, s in enumerate(slices)
        if s.finished_s > begin_s and s.ready_s < end_s
    ]  # fmt: skip
    sent.sort(key=lambda each: each.started_s)
    waits = [
        _wait(op.could_start_s, op.start_s, op.name, before, begin_s)
        for op in ops
        if op.wait_s > _NOTHING_S
    ]
    if awaits_all:
        awaited_s = max(each.finished_s for each in mine)
        computed_s = max(op.end_s for op in ops)
        if awaited_s - computed_s > _NOTHING_S:
            waits.append(_wait(computed_s, awaited_s, "the next step", mine, begin_s))
    waits = [wait for wait in waits if wait.length_s > 0]
    spans = [Span("compute", each.name, each.begin_s, each.end_s) for each in busy]
    spans += [Span(name, name, *each) for name, intervals in links.items() for each in intervals]
    return SimulatedStep(
        title,
        step_s,
        busy,
        links,
        sent,
        waits,
        list(_idle(links, sent, busy, step_s)),
        overlap_of(spans, step_s),
    )


def _wait(
    from_s: float, until_s: float, waiting: str, slices: Sequence[SliceTimes], begin_s: float
) -> Wait:
    """Finds the slice that arrived last before the op started, and the slices ahead of it."""
    arrived = [s for s in slices if s.finished_s <= until_s + _NOTHING_S]
    awaited = max(arrived or slices, key=lambda s: s.finished_s)
    # An update after the arrival is work, not waiting.
    until_s = min(until_s, max(awaited.finished_s, from_s))
    ahead: dict[str, list[tuple[float, float]]] = {}
    for other in slices:
        first_s, last_s = max(other.started_s, awaited.ready_s), min(other.finished_s, until_s)
        if _tensor(other) != _tensor(awaited) and last_s - first_s > _NOTHING_S:
            ahead.setdefault(_tensor(other), []).append((first_s, last_s))
    behind = sorted(((name, busy_s(each)) for name, each in ahead.items()), key=lambda x: -x[1])
    return Wait(from_s - begin_s, until_s - begin_s, waiting, awaited.name, tuple(behind))


def _tensor(piece: SliceTimes) -> str:
    return re.sub(r"\[\d+\]$", "", piece.name)


def _idle(
    links: dict[str, list[tuple[float, float]]],
    sent: Sequence[Sent],
    busy: Sequence[Busy],
    step_s: float,
) -> Iterator[Idle]:
    """Intervals in which no link carried anything, with causes."""
    carried = sorted(each for intervals in links.values() for each in intervals)
    for begin_s, end_s in _gaps(carried, step_s):
        following = next((s.name for s in sent if s.started_s >= end_s - _NOTHING_S), None)
        if any(s.ready_s < begin_s + _NOTHING_S and s.started_s >= begin_s for s in sent):
            yield Idle(begin_s, end_s, _HELD_UP, following)
            continue
        during = dict.fromkeys(
            each.phase
            for each in busy
            if min(each.end_s, end_s) - max(each.begin_s, begin_s) > _NOTHING_S
        )
        doing = f" during {' and '.join(during)}" if during else ""
        yield Idle(begin_s, end_s, f"nothing to send{doing}", following)


def _gaps(intervals: Iterable[tuple[float, float]], end_s: float) -> Iterator[tuple[float, float]]:
    at_s = 0.0
    for begin_s, until_s in intervals:
        if begin_s - at_s > _NOTHING_S:
            yield at_s, begin_s
        at_s = max(at_s, until_s)
    if end_s - at_s > _NOTHING_S:
        yield at_s, end_s


def _clipped(
    intervals: Iterable[tuple[float, float]], begin_s: float, end_s: float
) -> Iterator[tuple[float, float]]:
    """Clips intervals to the range; times count from its begin."""
    for begin, end in intervals:
        if min(end, end_s) > max(begin, begin_s):
            yield max(begin, begin_s) - begin_s, min(end, end_s) - begin_s
