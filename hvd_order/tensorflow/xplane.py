"""Reads what TensorFlow's profiler leaves: ``*.xplane.pb`` files, one for each traced process."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from hvd_order.base.errors import InvalidUsage

__all__ = ["SUFFIX", "ThreadEvent", "events_by_thread", "node_of", "owner_of", "read_space"]

SUFFIX = ".xplane.pb"
_NODE = re.compile(r"^([^:\s]+):(\w+)$")  # node:Type


@dataclass(frozen=True)
class ThreadEvent:
    """Something that a thread did.

    Attributes:
        begin_ps, end_ps: picoseconds of the process' clock. Whole numbers: as a float, a time since
            1970 would be known to 0.2 us only.
        stats: what TensorFlow says about it, by name.
    """

    name: str
    begin_ps: int
    end_ps: int
    stats: dict[str, Any]


def read_space(path: Path) -> Any:
    """The content of one file, an XSpace.

    Raises:
        InvalidUsage: the file is none, or is not whole.
        OSError: there is no such file.
    """
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace()
    try:
        space.ParseFromString(path.read_bytes())
    except DecodeError as error:
        raise InvalidUsage(
            f"{path} is no file of TensorFlow's profiler, or only a part of one ({error}); a "
            "process must call tf.profiler.experimental.stop() before it ends"
        ) from None
    return space


def events_by_thread(space: Any) -> Iterator[list[ThreadEvent]]:
    """The events of each thread, in the order in which they began; what contains others is first.

    Of devices, each stream counts as a thread.
    """
    for plane in space.planes:
        names = {number: one.name for number, one in plane.stat_metadata.items()}
        for line in plane.lines:
            found = []
            for event in line.events:
                begin = line.timestamp_ns * 1000 + event.offset_ps
                stats = {names[stat.metadata_id]: _value(stat, names) for stat in event.stats}
                name = plane.event_metadata[event.metadata_id].name
                found.append(ThreadEvent(name, begin, begin + event.duration_ps, stats))
            found.sort(key=lambda event: (event.begin_ps, -event.end_ps))
            yield found


def _value(stat: Any, names: dict[int, str]) -> Any:
    kind = stat.WhichOneof("value")
    if kind == "ref_value":
        return names.get(stat.ref_value)
    return getattr(stat, kind) if kind else None


def node_of(event: str) -> tuple[str, str] | None:
    """The node of the graph and its type, if an event is the run of one."""
    match = _NODE.match(event)
    return (match[1], match[2]) if match else None


def owner_of(node: str, known: Container[str]) -> str | None:
    """The operation of the traced graph that a node belongs to.

    Optimization inlines the functions that the graph calls: their nodes are named after the call.
    """
    while node not in known:
        node, slash, _ = node.rpartition("/")
        if not slash:
            return None
    return node
