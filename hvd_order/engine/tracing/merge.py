"""Parts of several ranks become one trace in the clock of rank 0. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

from hvd_order.base.account.clock_offset import ClockOffset
from hvd_order.engine.tracing.events import Event, names_of

__all__: list[str] = []

_Slot = tuple[int, int]  # (model, slice)


class RankPart(TypedDict):
    """What a rank has recorded, in microseconds of its own clock."""

    events: list[Event]


def merged(
    parts: Mapping[int, RankPart],
    clocks: Mapping[int, Sequence[ClockOffset]],
    missing: Mapping[str, Sequence[int]] | None = None,
) -> dict[str, Any]:
    """Returns the trace, a JSON object of the Chrome trace format.

    Args:
        parts: by rank. The first one's clock is that of the trace.
        clocks: offsets to that clock: at the begin and at the end of the recording, or one.
        missing: ranks that are not in it, by cause.
    """
    first = min(parts)
    events = [named for rank in sorted(parts) for named in names_of(rank)]
    reference = parts[first]["events"]
    errors_us = {}
    for rank in sorted(parts):
        clock = _RankClock(clocks.get(rank, ()))
        own = [clock.shifted(each, rank) for each in parts[rank]["events"]]
        if rank != first:
            errors_us[rank] = clock.error_us
            own = _same_steps(own, reference, clock.error_us)
        events += own
    document: dict[str, Any] = {"traceEvents": events, "displayTimeUnit": "ms"}
    document["otherData"] = {
        "ranks": sorted(parts),
        "clock": f"rank {first}'s",
        "clock_error_us": round(max(errors_us.values(), default=0.0), 1),
        "clock_error_us_of_rank": {rank: round(error, 1) for rank, error in errors_us.items()},
        "missing": {cause: list(ranks) for cause, ranks in (missing or {}).items()},
    }
    return document


class _RankClock:
    """A rank's clock: what its times are on the clock of the trace.

    One offset holds throughout if what was found at the begin and at the end allows it; else the
    clocks drift apart visibly, and the offset between both is on a straight line.
    """

    def __init__(self, offsets: Sequence[ClockOffset]) -> None:
        self._points = [(offset.at_ns / 1e3, offset.ns / 1e3) for offset in offsets]
        self.error_us = max((offset.error_ns / 1e3 for offset in offsets), default=0.0)
        low_ns = max((offset.low_ns for offset in offsets), default=0.0)
        high_ns = min((offset.high_ns for offset in offsets), default=0.0)
        if low_ns <= high_ns:
            middle_ns = (low_ns + high_ns) / 2
            self._points = [(0.0, middle_ns / 1e3)]
            far = [max(o.high_ns - middle_ns, middle_ns - o.low_ns) / 1e3 for o in offsets]
            self.error_us = max(far, default=0.0)

    def of_trace(self, at_us: float) -> float:
        (begin_us, first_us), (end_us, last_us) = self._points[0], self._points[-1]
        part = 0.0
        if end_us > begin_us:
            part = min(max((at_us - begin_us) / (end_us - begin_us), 0.0), 1.0)
        return at_us - first_us - part * (last_us - first_us)

    def shifted(self, event: Event, rank: int) -> Event:
        begin_us = float(event.get("ts", 0.0))
        moved = {**event, "pid": rank, "ts": self.of_trace(begin_us)}
        if "dur" in event:
            moved["dur"] = self.of_trace(begin_us + event["dur"]) - moved["ts"]
        return moved


def _same_steps(events: list[Event], reference: Iterable[Event], error_us: float) -> list[Event]:
    """Numbers the steps of a rank as the reference does.

    Ranks begin to record at different moments of a step. Nobody has a sum before everybody has
    sent, so the transfers of one slice in one step overlap, on one clock.
    """
    shifts: dict[int, Counter[int]] = defaultdict(Counter)
    theirs: dict[_Slot, list[Event]] = defaultdict(list)
    for event in _transfers(reference):
        theirs[_slot(event)].append(event)
    for times in theirs.values():
        times.sort(key=_begin)
    places: Counter[_Slot] = Counter()
    for event in sorted(_transfers(events), key=_begin):
        slot = _slot(event)
        others = theirs.get(slot, [])
        while places[slot] < len(others) and _end(others[places[slot]]) + error_us < _begin(event):
            places[slot] += 1
        best, best_us = None, -error_us
        for other in others[places[slot] : places[slot] + 2]:
            overlap_us = min(_end(event), _end(other)) - max(_begin(event), _begin(other))
            if overlap_us >= best_us:
                best, best_us = other, overlap_us
        if best is not None:
            shifts[slot[0]][best["args"]["step"] - event["args"]["step"]] += 1
    by_model = {model: counts.most_common(1)[0][0] for model, counts in shifts.items()}
    return [_renumbered(event, by_model) for event in events]


def _renumbered(event: Event, by_model: Mapping[int, int]) -> Event:
    args = event.get("args", {})
    shift = by_model.get(args.get("model", -1), 0)
    if not shift or "step" not in args:
        return event
    return {**event, "args": {**args, "step": args["step"] + shift}}


def _transfers(events: Iterable[Event]) -> Iterable[Event]:
    return (event for event in events if event.get("cat") == "transfer")


def _slot(event: Event) -> _Slot:
    return event["args"]["model"], event["args"]["slice"]


def _begin(event: Event) -> float:
    return float(event["ts"])


def _end(event: Event) -> float:
    return float(event["ts"] + event["dur"])
