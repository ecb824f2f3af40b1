"""Events of a Chrome trace, in the rows that every rank has."""

from __future__ import annotations

from typing import Any

__all__: list[str] = []

Event = dict[str, Any]

ROWS = {"queue": 1, "transfer": 2, "compute": 3, "wait": 4, "update": 5}
"""The rows of a rank: their threads in the trace, by category."""


def event(category: str, name: str, start_ns: int, end_ns: int, args: dict[str, Any]) -> Event:
    """Returns something that took time, in ns of this rank's clock; the trace has microseconds."""
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "ts": start_ns / 1e3,
        "dur": (end_ns - start_ns) / 1e3,
        "tid": ROWS.get(category, 0),
        "args": args,
    }


def names_of(rank: int) -> list[Event]:
    """Returns the events that name a rank and its rows."""

    def named(kind: str, tid: int, name: str) -> Event:
        return {"name": kind, "ph": "M", "pid": rank, "tid": tid, "args": {"name": name}}

    return [
        named("process_name", 0, f"rank {rank}"),
        *(named("thread_name", tid, row) for row, tid in ROWS.items()),
    ]
