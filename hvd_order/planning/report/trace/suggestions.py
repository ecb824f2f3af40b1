"""What would shorten the steps of a timeline, by the simulator.

The step of the trace becomes a chain of layers: gradients have the times at which they were ready,
the forward pass is spread over layers as the backward pass is, the link has the times of the
recorded transfers, each from when the last rank had its gradient. The same step is then simulated
with one change at a time. Where the simulation without a change does not take as long as the
recorded step, nothing is suggested: loaders, the host and other programs are not simulated.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from hvd_order.base.errors import InvalidUsage
from hvd_order.planning.predict.simulate import (
    AllReduceScenario,
    Simulated,
    StepWorkload,
    TransferSchedule,
    simulate,
)
from hvd_order.planning.report.page import ms_text
from hvd_order.planning.report.trace_file import (
    RankTimeline,
    TracedJob,
    TracedSlice,
    TracedSpan,
)

__all__ = ["Suggestion", "Suggestions", "suggest"]

_STEPS = 8
_TRUST = 0.25  # of the recorded step, by which the simulated one may differ
_MOST = 3
_LEAST_GAIN = 0.01  # of a step
_LEAST_COST_S = 1e-6  # of a slice
_APART = 4  # sizes of slices that tell latency from bytes
_CODED = 8.125 / 32  # a code and its part of a block's scale, of a float32
_SLICE_BYTES = (64 * 2**10, 16 * 2**20)  # least and most to suggest
_PART = re.compile(r"\[slice \d+\]$")


@dataclass(frozen=True)
class Suggestion:
    """A change.

    Attributes:
        text: what to change.
        gain_s: seconds of each step that it saves, by the simulator.
    """

    text: str
    gain_s: float


@dataclass(frozen=True)
class Suggestions:
    """The changes that help most.

    Attributes:
        measured_s: median step of the trace; None: it has fewer than two.
        simulated_s: the same step in the simulator, without a change.
        best: the largest gain first.
        why_none: why nothing could be simulated; empty: it could.
    """

    measured_s: float | None
    simulated_s: float
    best: list[Suggestion]
    why_none: str = ""


@dataclass(frozen=True)
class _TracedSetting:
    sizes: Sequence[int]
    forward_s: Sequence[float]
    backward_s: Sequence[float]
    update_s_per_byte: float
    network: AllReduceScenario
    schedule: TransferSchedule
    slowness: Sequence[float]

    def run(self) -> Simulated:
        names = [f"layer {i}" for i in range(len(self.sizes))]
        work = StepWorkload.chain(
            names, self.forward_s, self.backward_s, [[size] for size in self.sizes],
            self.update_s_per_byte,
        )  # fmt: skip
        return simulate(
            work, self.network, self.schedule, ranks=self.slowness, steps=_STEPS, recorded=2
        )


def step_s(timeline: RankTimeline) -> float | None:
    """Returns the median step: from one step's last gradient to that of the next; None: unknown."""
    ready: dict[int, float] = {}
    for queued in timeline.queued:
        ready[queued.step] = max(queued.begin_us, ready.get(queued.step, -math.inf))
    steps = sorted(ready)
    lengths = [ready[b] - ready[a] for a, b in pairwise(steps) if b == a + 1]
    return statistics.median(lengths) / 1e6 if lengths else None


def suggest(job: TracedJob) -> Suggestions:
    """Returns the changes that save most, at most three."""
    rank = min(job.ranks)
    measured_s = step_s(job.ranks[rank])
    try:
        setting = _setting(job)
        now_s = setting.run().steady_s
        found = [
            Suggestion(text, now_s - other.run().steady_s) for text, other in _changes(setting, job)
        ]
    except InvalidUsage as error:
        return Suggestions(measured_s, 0.0, [], str(error))
    if measured_s is not None and abs(now_s - measured_s) > _TRUST * measured_s:
        why = (
            f"the simulated step takes {ms_text(now_s)}, the recorded one {ms_text(measured_s)}, "
            "which has more in it (a loader, the host, other programs)"
        )
        return Suggestions(measured_s, now_s, [], why)
    worth = [each for each in found if each.gain_s > _LEAST_GAIN * now_s]
    return Suggestions(measured_s, now_s, sorted(worth, key=lambda each: -each.gain_s)[:_MOST])


# ---- the step of the trace ------------------------------------------------------------------


def _setting(job: TracedJob) -> _TracedSetting:
    computing = {rank: _compute_s(timeline) for rank, timeline in job.ranks.items()}
    known = {rank: seconds for rank, seconds in computing.items() if seconds > 0}
    if len(job.ranks) < 2 or len(known) < len(job.ranks):
        raise InvalidUsage(
            "a simulation needs the forward and backward passes of two ranks or more: record some "
            "steps on all ranks into one file"
        )
    fastest = min(known, key=lambda rank: known[rank])
    timeline = job.ranks[fastest]
    sizes, ready_s = _parameters(timeline)
    latest = list(ready_s)  # a chain: each gradient comes after those that are needed later
    for i in reversed(range(len(latest) - 1)):
        latest[i] = max(latest[i], latest[i + 1])
    backward_s = [
        max(0.0, at - after) for at, after in zip(latest, [*latest[1:], 0.0], strict=True)
    ]  # fmt: skip
    forward_s = _forward_s(timeline)
    whole_s = sum(backward_s) or 1.0
    steps = max(1, len(timeline.steps()))
    network = _network(_travelling(job, timeline))
    update_s = sum(span.duration_us for span in timeline.updates) / 1e6 / steps
    return _TracedSetting(
        sizes,
        [forward_s * seconds / whole_s for seconds in backward_s],
        backward_s,
        update_s / sum(sizes),
        network,
        _schedule(timeline, network),
        [known[rank] / known[fastest] for rank in sorted(known)],
    )


def _compute_s(timeline: RankTimeline) -> float:
    backward = [span.duration_us for span in timeline.compute if span.name == "backward"]
    if not backward:
        return 0.0
    return _forward_s(timeline) + statistics.median(backward) / 1e6


def _forward_s(timeline: RankTimeline) -> float:
    """Computation of a forward pass, without waits and updates in it."""
    idle = [*timeline.waits, *timeline.updates]
    lengths = []
    for span in timeline.compute:
        if span.name == "forward":
            inside = sum(
                max(0.0, min(each.end_us, span.end_us) - max(each.begin_us, span.begin_us))
                for each in idle
            )
            lengths.append(max(0.0, span.duration_us - inside))
    return statistics.median(lengths) / 1e6 if lengths else 0.0


def _parameters(timeline: RankTimeline) -> tuple[list[int], list[float]]:
    """Bytes of what is cut into slices, in order of need, and when it is ready in a step."""
    size: dict[str, dict[int, int]] = defaultdict(dict)
    ready: dict[str, dict[int, float]] = defaultdict(dict)
    urgency: dict[str, tuple[int, int]] = {}
    begins: dict[int, float] = {}
    for queued in timeline.queued:
        begins[queued.step] = min(queued.begin_us, begins.get(queued.step, math.inf))
    for queued in timeline.queued:
        if queued.name.startswith("parts of "):
            continue  # the second half of what travels already
        name = f"{queued.model}:{_PART.sub('', queued.name)}"
        size[name][queued.slice] = queued.bytes
        urgency[name] = min((queued.model, queued.priority), urgency.get(name, (1 << 30, 0)))
        after = queued.begin_us - begins[queued.step]
        ready[name][queued.step] = max(after, ready[name].get(queued.step, 0.0))
    names = sorted(urgency, key=lambda name: urgency[name])
    return (
        [sum(size[name].values()) for name in names],
        [statistics.median(ready[name].values()) / 1e6 for name in names],
    )


def _travelling(job: TracedJob, timeline: RankTimeline) -> list[TracedSlice]:
    """The transfers of a rank without the time in which another rank lacked the gradient."""
    ready: dict[tuple[int, int, int], float] = defaultdict(float)
    for of_rank in job.ranks.values():
        for queued in of_rank.queued:
            key = queued.model, queued.step, queued.slice
            ready[key] = max(ready[key], queued.begin_us)
    sent = []
    for each in timeline.transfers:
        begin_us = max(each.begin_us, ready[each.model, each.step, each.slice])
        sent.append(replace(each, begin_us=min(begin_us, each.end_us)))
    return sent


def _network(sent: Sequence[TracedSlice]) -> AllReduceScenario:
    """The link: all slices take the time in which anything travels; small ones show what a slice
    costs beside its bytes, half of it latency, as in `LinkModel`.
    """
    least, most = min(each.bytes for each in sent), max(each.bytes for each in sent)
    alpha_s = _LEAST_COST_S
    if most >= _APART * least:
        small_s = _quick_s(each for each in sent if each.bytes <= 2 * least)
        large_s = _quick_s(each for each in sent if each.bytes >= most / 2)
        beta = max(0.0, large_s - small_s) / (most - least)
        alpha_s = max(alpha_s, small_s - least * beta)
    busy_s = _union_us(sent) / 1e6
    cost_s = max(_LEAST_COST_S, min(alpha_s, busy_s / len(sent)) / 2)
    total = sum(each.bytes for each in sent)
    per_byte_s = max((busy_s - cost_s * len(sent)) / total, 1e-13)
    return AllReduceScenario(cost_s, per_byte_s, cost_s)


def _quick_s(sent: Iterable[TracedSpan]) -> float:
    """A transfer's time that neither other ranks nor other slices have made longer."""
    lengths = sorted(each.duration_us for each in sent)
    return lengths[len(lengths) // 10] / 1e6


def _union_us(spans: Iterable[TracedSpan]) -> float:
    total, until = 0.0, -math.inf
    for span in sorted(spans, key=lambda each: each.begin_us):
        total += max(0.0, span.end_us - max(span.begin_us, until))
        until = max(until, span.end_us)
    return total


def _schedule(timeline: RankTimeline, network: AllReduceScenario) -> TransferSchedule:
    sent = timeline.transfers
    largest = -(-max(each.bytes for each in sent) // 16) * 16
    in_flight = most = 0
    changes = [(each.begin_us, each.bytes) for each in sent]
    changes += [(each.end_us, -each.bytes) for each in sent]
    for _, change in sorted(changes):
        in_flight += change
        most = max(most, in_flight)
    return TransferSchedule(
        largest,
        max(most, largest),
        cross_iteration=_crosses(timeline, sent),
        control_latency_s=network.latency_s / 2,
    )


def _crosses(timeline: RankTimeline, sent: Sequence[TracedSlice]) -> bool:
    """Whether anything arrives after the next forward pass has begun."""
    forwards = [span for span in timeline.compute if span.name == "forward"]
    last_us: dict[int, float] = defaultdict(float)
    for each in timeline.queued:
        last_us[each.step] = max(last_us[each.step], each.begin_us)
    return any(
        span.begin_us >= last_us[each.step] and each.begin_us < span.begin_us < each.end_us
        for each in sent
        for span in forwards
    )


# ---- changes --------------------------------------------------------------------------------


def _changes(setting: _TracedSetting, job: TracedJob) -> Iterator[tuple[str, _TracedSetting]]:
    schedule, network = setting.schedule, setting.network
    for factor in (0.25, 0.5, 2.0, 4.0):
        size = round(factor * schedule.slice_bytes / 2**14) * 2**14
        if _SLICE_BYTES[0] <= size <= _SLICE_BYTES[1] and size != schedule.slice_bytes:
            credit = max(size, size * (schedule.credit_bytes // schedule.slice_bytes))
            other = replace(schedule, slice_bytes=size, credit_bytes=credit)
            yield (
                f"slices of {_size(size)} in place of {_size(schedule.slice_bytes)} "
                f"(HVD_ORDER_SLICE_BYTES={size})",
                replace(setting, schedule=other),
            )
    if not schedule.cross_iteration:
        yield (
            "the next forward pass begins before all gradients have arrived "
            "(HVD_ORDER_CROSS_ITERATION=1; optimizer.overlap_report() says what is in the way)",
            replace(setting, schedule=replace(schedule, cross_iteration=True)),
        )
    last = setting.run().slices()[0]
    plan = sorted(range(len(last)), key=lambda number: last[number].issued_s)
    planned = replace(schedule, policy="planned", agreement="planned", plan=plan)
    yield (
        "a planned order, which needs no messages (HVD_ORDER_AGREEMENT=planned)",
        replace(setting, schedule=planned),
    )
    yield (
        "gradients in 8-bit codes, if they are float32 now (compression=hvd.Compression.auto)",
        replace(
            setting,
            sizes=[max(16, int(_CODED * size)) for size in setting.sizes],
            update_s_per_byte=setting.update_s_per_byte / _CODED,
            network=replace(network, slice_cost_s=2 * network.slice_cost_s),
        ),
    )
    by_speed = sorted(setting.slowness)
    slow = max(range(len(setting.slowness)), key=lambda place: setting.slowness[place])
    even = [*setting.slowness]
    even[slow] = by_speed[-2]
    yield (
        f"rank {sorted(job.ranks)[slow]} computes as fast as the next slowest",
        replace(setting, slowness=even),
    )
    faster = replace(network, seconds_per_byte=network.seconds_per_byte / 2)
    yield "a link of twice the rate", replace(setting, network=faster)


def _size(size_bytes: int) -> str:
    kib = size_bytes / 2**10
    return f"{kib / 2**10:.3g} MiB" if kib >= 2**10 else f"{kib:.3g} KiB"
