"""Parts of one step on one rank, whose sum is the step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

__all__: list[str] = []

Span = tuple[int, int]
"""Begin and end in ns of the rank's clock."""


@dataclass
class StepMarks:
    """Times of one step, ns of the rank's clock; 0: not seen.

    Attributes:
        begin_ns: the first gradient.
        backward_ns: the end of the last backward pass.
        called_ns, returned_ns: ``step()``.
        read_ns: the first read of a parameter after it.
        end_ns: the first gradient of the next step.
        waits: with the tensor that was waited for. They do not overlap.
        updates: they overlap neither each other nor waits.
    """

    begin_ns: int
    backward_ns: int = 0
    called_ns: int = 0
    returned_ns: int = 0
    read_ns: int = 0
    end_ns: int = 0
    waits: list[tuple[int, int, int]] = field(default_factory=list)
    updates: list[Span] = field(default_factory=list)


@dataclass(frozen=True)
class StepParts:
    """Seconds of one step: ``compute_s + exposed_s + update_s + host_s`` is ``step_s``.

    Attributes:
        forward_s, backward_s: computation without waits and updates. Where no read of a parameter
            was seen, ``forward_s`` includes what comes before the forward pass. With several
            backward passes, all from the first gradient to the end of the last is ``backward_s``.
        loader_s: from the end of ``step()`` to the first read.
        rest_s: between the backward pass and the end of ``step()``.
        has_loader: whether a read was seen.
    """

    step_s: float
    forward_s: float
    backward_s: float
    loader_s: float
    rest_s: float
    exposed_s: float
    update_s: float
    has_loader: bool

    @property
    def compute_s(self) -> float:
        """Forward and backward pass."""
        return self.forward_s + self.backward_s

    @property
    def host_s(self) -> float:
        """What is neither computation nor communication nor update."""
        return self.loader_s + self.rest_s


def parts_of(times: StepMarks) -> StepParts:
    """Returns the parts of a step that has ended."""
    begin, end = times.begin_ns, times.end_ns
    # Marks that were not seen leave an empty part; each is at or after the one before.
    called = min(max(times.called_ns or times.returned_ns or end, begin), end)
    backward = min(max(times.backward_ns or called, begin), called)
    returned = min(max(times.returned_ns or called, called), end)
    read = min(max(times.read_ns or returned, returned), end)
    busy = [*((t0, t1) for t0, t1, _ in times.waits), *times.updates]

    def own_s(first: int, last: int) -> float:
        return (last - first - within(busy, first, last)) / 1e9

    return StepParts(
        step_s=(end - begin) / 1e9,
        forward_s=own_s(read, end),
        backward_s=own_s(begin, backward),
        loader_s=own_s(returned, read),
        rest_s=own_s(backward, returned),
        exposed_s=within([(t0, t1) for t0, t1, _ in times.waits], begin, end) / 1e9,
        update_s=within(times.updates, begin, end) / 1e9,
        has_loader=times.read_ns > 0,
    )


def within(spans: Iterable[Span], first: int, last: int) -> int:
    """Length of the parts of ``spans``, which do not overlap, between ``first`` and ``last``."""
    return sum(max(0, min(t1, last) - max(t0, first)) for t0, t1 in spans)


def union(spans: Iterable[Span]) -> list[Span]:
    """The same moments as spans that do not overlap, by time."""
    merged: list[Span] = []
    for t0, t1 in sorted(spans):
        if merged and t0 <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], t1))
        elif t1 > t0:
            merged.append((t0, t1))
    return merged


def overlap(transfers: Iterable[Span], waits: Sequence[Span]) -> float:
    """The part of communication during which the rank did not wait for it, as Holistic Trace
    Analysis has it: time(communication and computation) / time(communication).

    Returns:
        0 to 1; 1 without communication.
    """
    merged = union(transfers)
    busy = sum(t1 - t0 for t0, t1 in merged)
    if busy == 0:
        return 1.0
    exposed = sum(within(waits, t0, t1) for t0, t1 in merged)
    return 1.0 - exposed / busy
