"""Timeline of transfers, waits and updates, as a Chrome trace that Perfetto opens.

Transfers come from the engine, waits and updates from the frontend, and further spans from the
user through :func:`timeline_span`. Horovod's ``start_timeline`` and ``stop_timeline`` switch it.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from hvd_order._native import _torch as native
from hvd_order.engine.engine_host import EngineHost, Engines
from hvd_order.engine.job import process
from hvd_order.engine.job.job import Job, held

__all__ = ["start_timeline", "stop_timeline", "timeline_span"]

_OFF = contextlib.nullcontext()
_ROWS = {"queue": 1, "transfer": 2, "compute": 3, "wait": 4, "update": 5}


class _TraceRecording:
    def __init__(self, path: str, rank: int) -> None:
        self.path = path
        self.rank = rank
        self.spans: list[dict[str, Any]] = []


class _JobTimeline:
    """The recording of one job, if there is one: a part of the `Job`."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.recording: _TraceRecording | None = None
        job.part(Engines).before_close(self.stop)
        job.on_shutdown(self.stop)  # for a process without an engine

    def start(self, path: str) -> None:
        """See `start_timeline`."""
        if self.recording is not None:
            raise ValueError(
                f"a timeline is being recorded to {self.recording.path}; call stop_timeline() first"
            )
        self.recording = _TraceRecording(path, self._job.rank)
        self._job.part(Engines).record(True)

    def stop(self) -> None:
        """Writes the trace. Does nothing if no recording is in progress."""
        recording, self.recording = self.recording, None
        if recording is None:
            return
        engines = self._job.part(Engines)
        engines.record(False)
        events = list(recording.spans)
        for host in engines.hosts.values():
            events += _transfers(host)
        events += _forward_passes(events)
        rank = recording.rank
        if rank == 0 or "{rank}" in recording.path:
            _write(os.path.abspath(recording.path.replace("{rank}", str(rank))), rank, events)


def _write(path: str, rank: int, events: list[dict[str, Any]]) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    for event in events:
        event["pid"] = rank
    names = [_metadata("process_name", rank, 0, f"rank {rank}")]
    names += [_metadata("thread_name", rank, tid, row) for row, tid in _ROWS.items()]
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"traceEvents": names + events, "displayTimeUnit": "ms"}, file)


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Starts a recording.

    Args:
        file_path: file that :func:`stop_timeline` (or ``shutdown()``) writes; on rank 0 only,
            unless it contains ``{rank}``.
        mark_cycles: accepted for compatibility with Horovod; this engine has no cycles.

    Raises:
        NotInitialized: before ``init()``.
        ValueError: a recording is in progress.
    """
    del mark_cycles
    process.current().part(_JobTimeline).start(file_path)


def stop_timeline() -> None:
    """Writes the trace. Does nothing if no recording is in progress."""
    timeline = _of_held_job()
    if timeline is not None:
        timeline.stop()


def _of_held_job() -> _JobTimeline | None:
    job = held()  # updates and waits that end the job are recorded too
    return None if job is None else job.existing_part(_JobTimeline)


def _start_if_asked() -> None:
    path = process.current().config.timeline
    if path:
        start_timeline(path)


process.at_init(_start_if_asked)


def span(category: str, name: str, **args: Any) -> contextlib.AbstractContextManager[None]:
    """Records the body as one event of this rank, if a recording is in progress."""
    timeline = _of_held_job()
    if timeline is None or timeline.recording is None:
        return _OFF
    return _span(timeline.recording, category, name, args)


def timeline_span(name: str) -> contextlib.AbstractContextManager[None]:
    """Records the body, a part of the user's own step such as "forward", as one event."""
    return span("compute", name)


@contextlib.contextmanager
def _span(
    recording: _TraceRecording, category: str, name: str, args: dict[str, Any]
) -> Iterator[None]:
    start = time.monotonic_ns()
    try:
        yield
    finally:
        recording.spans.append(_event(category, name, start, time.monotonic_ns(), args))


def _transfers(host: EngineHost) -> list[dict[str, Any]]:
    events = []
    journeys: Counter[tuple[int, int]] = Counter()  # of slices of the newest layout, by model
    layouts: dict[int, native.SliceLayout] = {}
    first: dict[int, int] = {}  # step of the newest layout
    last: Counter[int] = Counter()  # steps so far, by model
    for layout, record in host.take_transfers():
        model = record.model
        if layouts.get(model) is not layout:  # trials cut the model anew
            layouts[model] = layout
            first[model] = last[model]
            journeys = Counter({key: n for key, n in journeys.items() if key[0] != model})
        step = first[model] + journeys[model, record.slice]
        journeys[model, record.slice] += 1
        last[model] = max(last[model], step + 1)
        name = layout.slice_name(record.slice)
        args = {
            "slice": record.slice,
            "priority": record.slice,
            "bytes": layout.slices[record.slice].size_bytes,
            "model": record.model,
            "step": step,
        }
        events.append(_event("queue", name, record.ready_ns, record.issued_ns, args))
        events.append(_event("transfer", name, record.issued_ns, record.done_ns, args))
    return events


def _forward_passes(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Forward passes as the other events show them; none if the program has recorded its own.

    One begins at the first read of a parameter whose update was deferred, or at the end of a
    ``step()`` that has updated all, and ends with the first gradient that is sent after it.
    """
    if any((event["cat"], event["name"]) == ("compute", "forward") for event in events):
        return []
    passes: list[dict[str, Any]] = []
    begin_us: float | None = None
    wait_us: float | None = None  # of the next update, since its reader waited first
    for event in sorted(events, key=lambda event: event["ts"]):
        category, at_us = event["cat"], event["ts"]
        if category == "queue" and begin_us is not None:
            span = _event("compute", "forward", 0, 0, {})
            passes.append({**span, "ts": begin_us, "dur": at_us - begin_us})
            begin_us = None
        elif category == "wait" and wait_us is None:
            wait_us = at_us
        elif category == "update":
            if begin_us is None and event["args"].get("reader"):
                begin_us = at_us if wait_us is None else wait_us
            elif "tensors" not in event["args"]:
                begin_us = at_us + event["dur"]
            wait_us = None
    return passes


def _event(
    category: str, name: str, start_ns: int, end_ns: int, args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "ts": start_ns / 1e3,
        "dur": (end_ns - start_ns) / 1e3,
        "tid": _ROWS.get(category, 0),
        "args": args,
    }


def _metadata(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
