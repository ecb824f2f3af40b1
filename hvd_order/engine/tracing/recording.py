"""What one rank records, and its part of the trace."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hvd_order._native import _torch as native
from hvd_order.engine.engine_host import Transfer
from hvd_order.engine.tracing.arrows import Journey, arrows
from hvd_order.engine.tracing.events import Event
from hvd_order.engine.tracing.passes import Moment, passes

__all__: list[str] = []


class RankRecording:
    """A recording that is in progress. Lists are appended to by any thread.

    Attributes:
        path: as given to ``start_timeline()``.
        begin_ns: when it began, on this rank's clock.
        spans: waits, updates, and what the program records.
        moments: see `passes`.
    """

    def __init__(self, path: str, rank: int, begin_ns: int) -> None:
        """Starts empty."""
        self.path = path
        self.rank = rank
        self.begin_ns = begin_ns
        self.spans: list[Event] = []
        self.moments: list[Moment] = []

    @property
    def is_of_all_ranks(self) -> bool:
        """Whether rank 0 writes one file of all ranks; otherwise every rank writes its own."""
        return "{rank}" not in self.path

    def events(self, transfers: Iterable[Iterable[Transfer]]) -> list[Event]:
        """Returns this rank's events, in its own clock.

        Args:
            transfers: of each engine.
        """
        moments = sorted(self.moments, key=lambda moment: moment.at_ns)
        own = {each["name"] for each in self.spans if each["cat"] == "compute"}
        found = passes(moments, own)
        journeys = [each for of_engine in transfers for each in _journeys(of_engine)]
        waited = _with_slices(self.spans, journeys)
        sent = [each for journey in journeys for each in journey.events()]
        return [*waited, *found, *sent, *arrows(journeys, waited, moments, self.rank)]


def _journeys(transfers: Iterable[Transfer]) -> list[Journey]:
    found = []
    counts: Counter[tuple[int, int]] = Counter()  # of slices of the newest layout, by model
    layouts: dict[int, native.SliceLayout] = {}
    first: dict[int, int] = {}  # step of the newest layout
    last: Counter[int] = Counter()  # steps so far, by model
    of_slice: dict[tuple[int, int], tuple[int, ...]] = {}
    for layout, record in transfers:
        model, number = record.model, record.slice
        if layouts.get(model) is not layout:  # trials cut the model anew
            layouts[model] = layout
            first[model] = last[model]
            counts = Counter({key: n for key, n in counts.items() if key[0] != model})
            of_slice = {key: tensors for key, tensors in of_slice.items() if key[0] != model}
        step = first[model] + counts[model, number]
        counts[model, number] += 1
        last[model] = max(last[model], step + 1)
        key = model, number
        if key not in of_slice:
            of_slice[key] = tuple(layout.tensors_of(number))
        found.append(
            Journey(
                model,
                number,
                step,
                layout.slice_name(number),
                layout.slices[number].size_bytes,
                of_slice[key],
                record.ready_ns,
                record.issued_ns,
                record.done_ns,
            )
        )
    return found


@dataclass(frozen=True)
class _Tensors:
    """Journeys of the slices of each tensor of each model, in order of their ends."""

    of: Mapping[tuple[int, int], list[Journey]]

    @classmethod
    def of_journeys(cls, journeys: Iterable[Journey]) -> _Tensors:
        of: dict[tuple[int, int], list[Journey]] = defaultdict(list)
        for journey in sorted(journeys, key=lambda each: each.done_ns):
            for tensor in journey.tensors:
                of[journey.model, tensor].append(journey)
        return cls(of)

    def awaited(self, args: Mapping[str, Any], begin_us: float, end_us: float) -> list[Journey]:
        """The journeys that a wait for a tensor waited for: of each slice the last one that was
        ready before the wait ended, unless it had ended before the wait began.
        """
        found: dict[int, Journey] = {}
        for journey in self.of.get((args.get("model", -1), args.get("tensor", -1)), ()):
            if journey.ready_ns / 1e3 <= end_us:
                found[journey.slice] = journey
        late = [journey for journey in found.values() if journey.done_ns / 1e3 >= begin_us]
        return sorted(late, key=lambda journey: journey.done_ns)


def _with_slices(spans: Iterable[Event], journeys: Iterable[Journey]) -> list[Event]:
    """The spans; waits for a tensor get the slices and the step that they waited for."""
    tensors = _Tensors.of_journeys(journeys)
    result = []
    for span in spans:
        awaited = []
        if span["cat"] == "wait":
            awaited = tensors.awaited(span["args"], span["ts"], span["ts"] + span["dur"])
        if awaited:
            about = {
                "slices": sorted(journey.slice for journey in awaited),
                "step": awaited[-1].step,
            }
            result.append({**span, "args": {**span["args"], **about}})
        else:
            result.append({**span, "args": dict(span["args"])})
    return result
