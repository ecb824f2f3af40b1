"""Reads the engine's timeline: a Chrome trace, times in microseconds, into typed records."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hvd_order.base.errors import InvalidUsage


@dataclass(frozen=True)
class TracedSpan:
    """Something that took time on one rank: a wait, an update, a stretch of compute.

    Attributes:
        name: what it was, in the words of the trace.
        begin_us, end_us: microseconds on the clock of the trace.
    """

    name: str
    begin_us: float
    end_us: float

    @property
    def duration_us(self) -> float:
        """Length in microseconds."""
        return self.end_us - self.begin_us


@dataclass(frozen=True)
class TracedSlice(TracedSpan):
    """A slice that waits to be issued or that travels.

    Attributes:
        model: which of the process's models the slice belongs to.
        slice: the slice's number in its model.
        priority: place in consumption order, 0 is needed first.
        bytes: size.
        step: training step whose gradients it carries.
    """

    model: int
    slice: int
    priority: int
    bytes: int
    step: int


@dataclass(frozen=True)
class TracedWait(TracedSpan):
    """A wait of a reader.

    Attributes:
        model, slices, step: what it waited for; no slices: a wait for no parameter, such as the
            norms, or one that was recorded before the trace had them.
    """

    model: int = 0
    slices: tuple[int, ...] = ()
    step: int = 0


_AnySpan = TypeVar("_AnySpan", bound=TracedSpan)


@dataclass(frozen=True)
class RankTimeline:
    """One rank's timeline; every list is in order of beginning."""

    rank: int
    queued: tuple[TracedSlice, ...]
    transfers: tuple[TracedSlice, ...]
    waits: tuple[TracedWait, ...]
    updates: tuple[TracedSpan, ...]
    compute: tuple[TracedSpan, ...]

    def steps(self) -> list[int]:
        """Training steps with at least one transfer, ascending."""
        return sorted({transfer.step for transfer in self.transfers})


@dataclass(frozen=True)
class TracedJob:
    """The timelines of all ranks of a file.

    Attributes:
        ranks: by rank, ascending.
        clock_error_us: largest error of a time of one rank beside that of another; None: the file
            does not say.
    """

    ranks: Mapping[int, RankTimeline]
    clock_error_us: float | None


def read_job_trace(path: str | Path) -> TracedJob:
    """Reads the timelines of all ranks of a file.

    Raises:
        InvalidUsage: as `read_trace`.
    """
    source = Path(path)
    document = _document(source)
    ranks = sorted({_whole(event, "pid", source) for event in _complete(document, source)})
    timelines = {rank: read_trace(path, rank) for rank in ranks or [0]}
    about = document.get("otherData") if isinstance(document, dict) else None
    error = about.get("clock_error_us") if isinstance(about, dict) else None
    known = isinstance(error, int | float) and len(timelines) > 1
    return TracedJob(timelines, error if known else None)


def read_trace(path: str | Path, rank: int | None = None) -> RankTimeline:
    """Reads one rank's timeline.

    Args:
        path: a Chrome trace in JSON, as ``hvd.start_timeline`` writes it.
        rank: whose events to read when the file holds several; the lowest by default.

    Raises:
        InvalidUsage: the file cannot be read, is no Chrome trace, has a malformed event or holds
            no transfer of that rank; the message says which.
    """
    source = Path(path)
    events = _complete(_document(source), source)
    ranks = sorted({_whole(event, "pid", source) for event in events})
    chosen = rank if rank is not None else (ranks[0] if ranks else 0)
    if events and chosen not in ranks:
        raise InvalidUsage(f"{source} has no events of rank {chosen}, only of ranks {ranks}")
    mine = [event for event in events if event["pid"] == chosen]
    trace = RankTimeline(
        rank=chosen,
        queued=_sorted(_slice_event(event, source) for event in mine if _is(event, "queue")),
        transfers=_sorted(_slice_event(event, source) for event in mine if _is(event, "transfer")),
        waits=_sorted(_wait(event, source) for event in mine if _is(event, "wait")),
        updates=_sorted(_span(event, source) for event in mine if _is(event, "update")),
        compute=_sorted(_span(event, source) for event in mine if _is(event, "compute")),
    )
    if not trace.transfers:
        raise InvalidUsage(
            f"{source} holds no transfers of rank {chosen}; record at least one training step on "
            "two or more ranks between hvd.start_timeline() and hvd.stop_timeline()"
        )
    return trace


def _document(source: Path) -> Any:
    try:
        return json.loads(source.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidUsage(f"cannot read the trace {source}: {error.strerror}") from error
    except ValueError as error:
        raise InvalidUsage(
            f"{source} is not complete JSON ({error}); was the run ended before "
            "hvd.stop_timeline()?"
        ) from error


def _complete(document: Any, source: Path) -> list[Mapping[str, Any]]:
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        raise InvalidUsage(f'{source} is no Chrome trace: it has no list under "traceEvents"')
    return [each for each in events if isinstance(each, Mapping) and each.get("ph") == "X"]


def _is(event: Mapping[str, Any], category: str) -> bool:
    return event.get("cat") == category


def _span(event: Mapping[str, Any], source: Path) -> TracedSpan:
    begin = _number(event, "ts", source)
    return TracedSpan(_name(event), begin, begin + _number(event, "dur", source))


def _wait(event: Mapping[str, Any], source: Path) -> TracedWait:
    span = _span(event, source)
    args = event.get("args")
    slices = args.get("slices") if isinstance(args, Mapping) else None
    if not isinstance(args, Mapping) or not isinstance(slices, list):
        return TracedWait(span.name, span.begin_us, span.end_us)
    return TracedWait(
        name=span.name,
        begin_us=span.begin_us,
        end_us=span.end_us,
        model=_whole(args, "model", source),
        slices=tuple(_whole({"slice": each}, "slice", source) for each in slices),
        step=_whole(args, "step", source),
    )


def _slice_event(event: Mapping[str, Any], source: Path) -> TracedSlice:
    span = _span(event, source)
    args = event.get("args")
    if not isinstance(args, Mapping):
        raise InvalidUsage(f'{source}: event "{span.name}" has no "args"')
    return TracedSlice(
        name=span.name,
        begin_us=span.begin_us,
        end_us=span.end_us,
        model=_whole(args, "model", source, default=0),
        slice=_whole(args, "slice", source),
        priority=_whole(args, "priority", source),
        bytes=_whole(args, "bytes", source),
        step=_whole(args, "step", source),
    )


def _name(event: Mapping[str, Any]) -> str:
    return str(event.get("name", "?"))


def _number(fields: Mapping[str, Any], key: str, source: Path) -> float:
    value = fields.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidUsage(
            f'{source}: "{key}" of an event must be a number, got {value!r} in {dict(fields)!r}'
        )
    return float(value)


def _whole(fields: Mapping[str, Any], key: str, source: Path, *, default: int | None = None) -> int:
    value = fields.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidUsage(
            f'{source}: "{key}" of an event must be a whole number, got {value!r} in '
            f"{dict(fields)!r}"
        )
    return value


def _sorted(spans: Iterable[_AnySpan]) -> tuple[_AnySpan, ...]:
    return tuple(sorted(spans, key=lambda span: span.begin_us))
