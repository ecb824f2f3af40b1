"""What the profiler's trace of a worker or server tells about each run of a scheduled function.

TensorFlow gives each run a number, which is the same in all processes that take part. Operators
carry no number themselves: they lie within an event of the executor that does. A transfer begins at
its receiver with ``ProcessAsync::Start`` of a node ``<sender's node>/_<number>`` and ends with
``ProcessAsync::Done``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from hvd_order.base.errors import InvalidUsage
from hvd_order.tensorflow.xplane import SUFFIX, ThreadEvent, events_by_thread, node_of, read_space

__all__ = ["Run", "Timed", "find_file", "read_runs", "runs_of"]

_FUNCTION = "EagerLocalExecute: "
_STARTS = "FunctionRun"
_EXECUTOR = "ExecutorState::Process"
_ASYNC_START = "ExecutorState::ProcessAsync::Start"
_ASYNC_DONE = "ExecutorState::ProcessAsync::Done"
_TRANSFER = re.compile(r"^(.+)/_\d+$")
_DEVICE = "/device:"


@dataclass(frozen=True)
class Timed:
    """An interval of one process' clock, in picoseconds."""

    begin_ps: int
    end_ps: int


@dataclass
class Run:
    """What one process did in one run of a function.

    Attributes:
        ops: nodes of the graph and when they ran, in any order; a node may run several times.
        received: by node of the sender, from the request to the moment when the value was there.
        sent: nodes whose values went to other processes.
        end_ps: when the function had ended, with its parts on servers; None on servers.
    """

    ops: list[tuple[str, Timed]] = field(default_factory=list)
    received: dict[str, Timed] = field(default_factory=dict)
    sent: set[str] = field(default_factory=set)
    end_ps: int | None = None

    @property
    def asked_ps(self) -> int | None:
        """When the first value was asked for; None if none was."""
        return min((one.begin_ps for one in self.received.values()), default=None)

    @property
    def came_ps(self) -> int | None:
        """When the last value was there."""
        return max((one.end_ps for one in self.received.values()), default=None)


@dataclass(frozen=True)
class _Trace:
    runs: dict[int, Run]
    calls: dict[str, list[tuple[int, int]]]  # by function: when a run began, and its number


def find_file(path: Path) -> Path:
    """The trace that a path means: a file, or the only one in a folder.

    Raises:
        InvalidUsage: there is none, or several.
    """
    if path.is_file():
        return path
    found = sorted(path.rglob(f"*{SUFFIX}"))
    if len(found) != 1:
        names = "".join(f"\n  {one}" for one in found)
        raise InvalidUsage(
            f"{path} has {len(found)} files *{SUFFIX}; expected one, of one process; name the file"
            f"{names}"
        )
    return found[0]


def runs_of(function: str, path: Path) -> dict[int, Run]:
    """The runs of a function in a worker's trace, by number, in their order.

    Args:
        function: name of the concrete function, ``__inference_step_96``.
        path: of the file.

    Raises:
        InvalidUsage: the trace is broken or has no run of it.
    """
    trace = _read(path)
    calls = sorted(trace.calls.get(function, []))
    if not calls:
        others = ", ".join(sorted(trace.calls)) or "none"
        raise InvalidUsage(
            f"{path} has no run of the function {function}; functions that ran: {others}. Trace a "
            "worker while it runs what the coordinator schedules, and pass that tf.function itself"
        )
    return {number: trace.runs[number] for _, number in calls if number in trace.runs}


def read_runs(path: Path) -> dict[int, Run]:
    """All runs in a trace, by number: a server's part of a function has another name.

    Raises:
        InvalidUsage: the trace is broken.
    """
    return _read(path).runs


def _read(path: Path) -> _Trace:
    space = read_space(path)
    devices = [plane.name for plane in space.planes if _DEVICE in plane.name and plane.lines]
    if devices:
        raise InvalidUsage(
            f"{path} has events of {devices[0]}; only traces of processors can be read so far"
        )
    trace = _Trace({}, {})
    started: dict[tuple[int, str], tuple[int, str]] = {}
    done: dict[tuple[int, str], int] = {}
    for events in events_by_thread(space):
        _note_calls(events, trace)
        _note_ops(events, trace)
        for event in events:
            if event.name in (_ASYNC_START, _ASYNC_DONE):
                key = int(event.stats["step_id"]), str(event.stats["name"])
                if event.name == _ASYNC_START:
                    started[key] = event.begin_ps, str(event.stats["kernel_type"])
                else:
                    done[key] = event.begin_ps
    for key, (begin, kernel) in started.items():
        if key not in done:
            continue  # the trace ended first
        number, name = key
        run, interval = trace.runs.setdefault(number, Run()), Timed(begin, done[key])
        sender = _TRANSFER.match(name)
        if kernel == "_Recv" and sender:
            run.received[sender[1]] = interval
        else:
            run.ops.append((name, interval))
    return trace


def _note_calls(events: Iterable[ThreadEvent], trace: _Trace) -> None:
    """Which function each run is of."""
    name, end = "", 0
    for event in events:
        if event.name.startswith(_FUNCTION):
            name, end = event.name.removeprefix(_FUNCTION), event.end_ps
        elif event.name == _STARTS and event.begin_ps < end:
            number = int(event.stats["id"])
            trace.calls.setdefault(name, []).append((event.begin_ps, number))
            trace.runs.setdefault(number, Run()).end_ps = end
            end = 0


def _note_ops(events: Iterable[ThreadEvent], trace: _Trace) -> None:
    """Nodes that ran within the executor's events, each with its run."""
    number, end = 0, 0
    for event in events:
        if event.name == _EXECUTOR:
            if event.begin_ps >= end:  # not that of a function which a node calls
                number, end = int(event.stats["id"]), event.end_ps
            continue
        node = node_of(event.name)
        if node is None or event.begin_ps >= end:
            continue
        run = trace.runs.setdefault(number, Run())
        if node[1] == "_Send":
            run.sent.add(str(event.stats.get("from", node[0])))
        else:
            run.ops.append((node[0], Timed(event.begin_ps, event.end_ps)))
