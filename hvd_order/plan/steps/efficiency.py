"""How well a step overlaps communication and computation: TicTac's E and S.

U is the time of everything one after the other, L that of the busiest resource; no step is shorter
than L, and one that never idles is not longer than U. Neither knows what depends on what, so E = 1
may be out of reach: bound.py and pull_bound.py say what is in reach.

Source:
    TicTac (MLSys 2019), section 3.2, and the authors' ``utils.py``: what a resource has worked is
    the *union* of its busy intervals, since what it does at a time may be recorded several times.
    Their makespan begins with the first compute op; ours with the first span of any resource.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from hvd_order.errors import InvalidUsage

__all__ = ["Overlap", "Span", "busy_s", "overlap_of"]


@dataclass(frozen=True)
class Span:
    """Something that a resource did, measured or simulated; in seconds on any one clock."""

    resource: str
    name: str
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Overlap:
    """A step in three numbers.

    Attributes:
        step_s: how long it took, waits included; m in the paper.
        serial_s: all resources' work, added up; U.
        busiest_s: the work of the busiest resource; L.
    """

    step_s: float
    serial_s: float
    busiest_s: float

    @property
    def efficiency(self) -> float | None:
        """E = (U - m) / (U - L): 1 is perfect, 0 as if nothing overlapped, less if time was lost.

        None if only one resource works: there is nothing to overlap (the paper's code says -1).
        """
        return self.part_of_possible(self.busiest_s)

    @property
    def speedup(self) -> float:
        """S = (U - L) / L: 0 is nothing to gain from any order, 1 twice the throughput at best."""
        return (self.serial_s - self.busiest_s) / self.busiest_s if self.busiest_s else 0.0

    def part_of_possible(self, bound_s: float) -> float | None:
        """E with a step time that this graph can reach in place of L: 0.93 of what is possible.

        Args:
            bound_s: no schedule takes less.

        Returns:
            None if the bound says that nothing can overlap.
        """
        possible_s = self.serial_s - bound_s
        # Sums of the same work, taken in another order, differ in the last bits.
        if possible_s <= 1e-12 * self.serial_s:
            return None
        return (self.serial_s - self.step_s) / possible_s


def busy_s(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of a union of intervals, given as (begin, end)."""
    total, covered_until = 0.0, -math.inf
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, covered_until))
        covered_until = max(covered_until, end)
    return total


def overlap_of(spans: Iterable[Span], step_s: float | None = None) -> Overlap:
    """Sums up one step.

    Args:
        spans: what its resources did, two or more of them.
        step_s: how long it took, where the spans do not tell: in the steady state, from the start
            of a step to the start of the next. None: from the first begin to the last end.

    Raises:
        InvalidUsage: a span ends before it begins, or there is none.
    """
    by_resource: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for span in spans:
        if not span.begin_s <= span.end_s:
            raise InvalidUsage(
                f"{span.name!r} on {span.resource} begins at {span.begin_s} s "
                f"and ends at {span.end_s} s"
            )
        by_resource[span.resource].append((span.begin_s, span.end_s))
    if not by_resource:
        raise InvalidUsage("a step without spans has no efficiency; was anything recorded?")
    if step_s is None:
        edges = [edge for intervals in by_resource.values() for edge in intervals]
        step_s = max(end for _, end in edges) - min(begin for begin, _ in edges)
    work = [busy_s(intervals) for intervals in by_resource.values()]
    return Overlap(step_s, math.fsum(work), max(work))
