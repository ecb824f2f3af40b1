"""Arrows of a trace: a gradient is ready, its slice travels, it is applied, it is read. Pure.

Perfetto draws them between the events that are under way at these moments in these rows ("flow
events" of the Chrome trace format).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from hvd_order.engine.tracing.events import ROWS, Event, event
from hvd_order.engine.tracing.passes import Moment

__all__: list[str] = []


@dataclass(frozen=True)
class Journey:
    """One transfer of one slice; times in ns of this rank's clock.

    Attributes:
        tensors: that it has bytes of, by number; that which is needed first comes first.
    """

    model: int
    slice: int
    step: int
    name: str
    size_bytes: int
    tensors: Sequence[int]
    ready_ns: int
    issued_ns: int
    done_ns: int

    def events(self) -> list[Event]:
        """Returns its wait in the queue, and its transfer."""
        args = {
            "slice": self.slice,
            "priority": self.slice,
            "bytes": self.size_bytes,
            "model": self.model,
            "step": self.step,
        }
        return [
            event("queue", self.name, self.ready_ns, self.issued_ns, args),
            event("transfer", self.name, self.issued_ns, self.done_ns, dict(args)),
        ]


class _ByTensor:
    """Times in us of something that happens to tensors, by model and tensor."""

    def __init__(self) -> None:
        self._times: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)

    def add(self, model: int, tensors: Iterable[int], begin_us: float, end_us: float) -> None:
        for tensor in tensors:
            self._times[model, tensor].append((begin_us, end_us))

    def sort(self) -> None:
        for times in self._times.values():
            times.sort()

    def first(
        self, model: int, tensor: int, from_us: float, until_us: float
    ) -> tuple[float, float] | None:
        times = self._times.get((model, tensor), [])
        place = bisect_left(times, (from_us, -math.inf))
        return times[place] if place < len(times) and times[place][0] < until_us else None


def arrows(
    journeys: Iterable[Journey], spans: Iterable[Event], moments: Iterable[Moment], rank: int
) -> list[Event]:
    """Returns the flow events of one rank.

    An arrow ends at the read if a reader came before the update, and otherwise at the update: a
    parameter that has been updated is read without a trace.

    Args:
        spans: among them the updates, with ``model`` and ``parameters`` in their arguments.
        moments: among them the reads.
    """
    updates, reads = _ByTensor(), _ByTensor()
    for span in spans:
        if span["cat"] == "update" and "parameters" in span["args"]:
            args = span["args"]
            updates.add(args["model"], args["parameters"], span["ts"], span["ts"] + span["dur"])
    for moment in moments:
        if moment.kind == "read":
            at_us = moment.at_ns / 1e3
            reads.add(moment.model, moment.tensors, at_us, at_us)
    updates.sort()
    reads.sort()
    found: list[Event] = []
    next_us: dict[tuple[int, int], float] = {}  # when the slice is ready once more
    for journey in sorted(journeys, key=lambda each: each.ready_ns, reverse=True):
        slot = journey.model, journey.slice
        found += _of(journey, updates, reads, next_us.get(slot, math.inf), rank)
        next_us[slot] = journey.ready_ns / 1e3
    return found


def _of(
    journey: Journey, updates: _ByTensor, reads: _ByTensor, until_us: float, rank: int
) -> Iterator[Event]:
    key = f"{rank}/{journey.model}/{journey.step}/{journey.slice}"

    def point(kind: str, row: str, at_us: float) -> Event:
        end = {"bp": "e"} if kind == "f" else {}  # the event that it is in, not the next one
        return {
            "name": "gradient", "cat": "gradient", "ph": kind, "id": key, "ts": at_us,
            "tid": ROWS[row], **end,
        }  # fmt: skip

    done_us = journey.done_ns / 1e3
    tensor = journey.tensors[0] if journey.tensors else -1
    update = updates.first(journey.model, tensor, done_us, until_us)
    yield point("s", "queue", journey.ready_ns / 1e3)
    if update is None:
        yield point("f", "transfer", journey.issued_ns / 1e3)
        return
    yield point("t", "transfer", journey.issued_ns / 1e3)
    begin_us, end_us = update
    read = reads.first(journey.model, tensor, journey.ready_ns / 1e3, until_us)
    if read is None or read[0] > end_us:
        yield point("f", "update", begin_us)
    else:
        yield point("t", "update", begin_us)
        yield point("f", "compute", end_us)  # the reader goes on
