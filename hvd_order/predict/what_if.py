"""Predicted step on a network, sent as today and in order, with its waits and their causes.

All results come from a few simulated steps; times are of one step in the steady state.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hvd_order.errors import InvalidUsage
from hvd_order.plan.bounds.bound import program_optimum_s, step_bound_s
from hvd_order.plan.graph.graph import Graph, Phase
from hvd_order.plan.link.advice import Outlook
from hvd_order.plan.link.link_model import LinkModel
from hvd_order.plan.link.slice_settings import arrival_settings, best_settings, reservation_lead_s
from hvd_order.plan.steps.efficiency import Overlap, Span, busy_s, overlap_of
from hvd_order.predict.network import Network
from hvd_order.predict.simulate import (
    AllReduce,
    ParameterServers,
    Schedule,
    Simulated,
    SliceTimes,
    Workload,
    ddp,
    simulate,
)
from hvd_order.predict.workload import workload_of

__all__ = ["Busy", "Idle", "Sent", "Step", "Wait", "WayName", "WhatIf"]

WayName = Literal["today", "arrival", "order"]

_STEPS, _RECORDED = 12, 3  # the last but one is evaluated: its transfers end in the last
_QUICK_STEPS = 8
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
class Step:
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
    overlap: Overlap

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
class _Way:
    title: str
    work: Workload
    network: AllReduce | ParameterServers
    schedule: Schedule


class WhatIf:
    """A model on a network."""

    def __init__(self, graph: Graph, network: Network, servers: int | None = None) -> None:
        """Takes the graph of one worker's step, with median times.

        Args:
            servers: parameter servers with links like the workers'; None: all-reduce.

        Raises:
            InvalidUsage: no gradient travels: one worker without servers, or no gradients.
        """
        if servers is not None and servers < 1:
            raise InvalidUsage(f"{servers} servers; at least 1 is needed")
        if not any(graph.producers):
            raise InvalidUsage("no parameter of the profile has a gradient, so nothing travels")
        if network.ranks == 1 and servers is None:
            raise InvalidUsage("with one worker nothing travels; ask for two or more")
        # Servers update their parameters, so workers do not.
        self.graph = graph if servers is None else _without_updates(graph)
        self.network = network
        self.servers = servers
        self.size_bytes = sum(
            p.size_bytes for p, producers in zip(graph.parameters, graph.producers, strict=True)
            if producers
        )  # fmt: skip
        self._phases = {op.name: op.phase for op in graph.ops}
        self._work = workload_of(self.graph)

    @property
    def link(self) -> LinkModel:
        """Link model for bounds and slice settings: all workers' bytes over the bottleneck."""
        if self.servers is None:
            return self.network.link
        # Each byte leaves each worker once, and all workers' bytes arrive at the servers.
        worst = max(1.0, self.network.ranks / self.servers)
        message_s = self.network.message_latency_s
        return LinkModel(2 * message_s, max(message_s, 1e-6), worst / self._rate)

    @property
    def wire_s(self) -> float:
        """Time of a link for a step's gradients, bytes alone."""
        return self.size_bytes * self.link.seconds_per_byte

    @property
    def bound_s(self) -> float:
        """Lower bound on the step for any order of transfers, ops in program order."""
        single = len(self.graph.resources) == 1
        return (program_optimum_s if single else step_bound_s)(self.graph, self.link)

    def outlook(self) -> Outlook:
        """Step times of all ways of sending, and the bound."""
        times = {name: self._played(way, _QUICK_STEPS, 0).steady_s for name, way in self._ways()}
        return Outlook(
            self.network.ranks,
            self.graph.compute_s,
            self.wire_s,
            times["today"],
            times["arrival"],
            times["order"],
            self.bound_s,
        )

    def step(self, name: WayName) -> Step:
        """A steady step, sent in one of the ways."""
        way = dict(self._ways())[name]
        return _step(way, self._played(way, _STEPS, _RECORDED), self._phases)

    def _played(self, way: _Way, steps: int, recorded: int) -> Simulated:
        return simulate(
            way.work, way.network, way.schedule,
            ranks=self.network.ranks, steps=steps, recorded=recorded,
        )  # fmt: skip

    @property
    def _rate(self) -> float:
        rate = self.network.bytes_per_s
        if not rate:
            raise InvalidUsage("one worker has no measured bandwidth; give --bandwidth")
        return rate

    def _ways(self) -> Iterator[tuple[WayName, _Way]]:
        link, message_s = self.link, self.network.message_latency_s
        best = best_settings(link, self.size_bytes)
        order = Schedule(
            best.slice_bytes,
            best.credit_bytes,
            control_latency_s=message_s,
            reservation_lead_s=reservation_lead_s(link, best),
        )
        fused = arrival_settings(self.size_bytes)
        arrival = Schedule(
            fused.slice_bytes, fused.credit_bytes, "arrival", control_latency_s=message_s
        )
        sliced = f"in slices of {best.slice_bytes / 2**20:.3g} MiB, what is needed first first"
        if self.servers is None:
            network = self.network.all_reduce()
            buckets, all_awaited = ddp(self._work)
            yield "today", _Way("as today (DDP)", buckets, network, all_awaited)
            yield "arrival", _Way("as they come, overlapping", self._work, network, arrival)
            yield "order", _Way(sliced, self._work, network, order)
            return
        # Whole tensors; all ready tensors go to the servers at once.
        whole = _padded(max(self._work.parameter_bytes))
        unordered = Schedule(whole, whole + 2 * self.size_bytes, "arrival")
        tensors, slices = self._servers(unordered), self._servers(order)
        as_they_come = replace(tensors, pull_policy="arrival")
        later = replace(as_they_come, pull="next_step")
        yield "today", _Way("as today (pulled by the next step)", self._work, later, unordered)
        yield "arrival", _Way("as they come, pulled at once", self._work, as_they_come, unordered)
        yield "order", _Way(sliced, self._work, slices, order)

    def _servers(self, schedule: Schedule) -> ParameterServers:
        """Assigns slices in consumption order to the server with the fewest bytes so far."""
        assert self.servers is not None
        sizes = [piece.size_bytes for piece in self._work.layout(schedule.slice_bytes).slices]
        loads = [0] * self.servers
        places = []
        for size_bytes in sizes:
            places.append(min(range(self.servers), key=loads.__getitem__))
            loads[places[-1]] += size_bytes
        return ParameterServers(
            self.servers, self._rate, self._rate, self.network.message_latency_s, server_of=places
        )


def _padded(size_bytes: int) -> int:
    return (max(size_bytes, 64) + 15) // 16 * 16  # as a layout pads tensors


def _without_updates(graph: Graph) -> Graph:
    ops = tuple(replace(op, duration_s=0.0) if op.phase == "update" else op for op in graph.ops)
    return Graph(graph.parameters, ops)


# --- reading a simulated step ------------------------------------------------------------------


def _step(way: _Way, result: Simulated, phases: dict[str, Phase]) -> Step:
    begin_s, end_s = result.step_starts_s()[-_RECORDED:][:2]
    step_s = end_s - begin_s
    ops = result.ops()[-2]
    busy = [
        Busy(op.name, phases[op.name], op.start_s - begin_s, op.end_s - begin_s)
        for op in ops
        if op.end_s > op.start_s
    ]
    busy += [
        Busy("update", "update", start, end)
        for update in result.updates()
        for start, end in _clipped([(update.start_s, update.end_s)], begin_s, end_s)
    ]
    busy.sort(key=lambda each: each.begin_s)
    links = {
        name: list(_clipped(intervals, begin_s, end_s))
        for name, intervals in result.link_busy().items()
        if name in ("link", "worker 0 up", "worker 0 down")
    }
    before, mine = result.slices()[-_RECORDED:][:2]
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
    if not way.schedule.cross_iteration:
        awaited_s = max(each.finished_s for each in mine)
        computed_s = max(op.end_s for op in ops)
        if awaited_s - computed_s > _NOTHING_S:
            waits.append(_wait(computed_s, awaited_s, "the next step", mine, begin_s))
    waits = [wait for wait in waits if wait.length_s > 0]
    spans = [Span("compute", each.name, each.begin_s, each.end_s) for each in busy]
    spans += [Span(name, name, *each) for name, intervals in links.items() for each in intervals]
    return Step(
        way.title,
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
