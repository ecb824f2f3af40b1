"""Overlap of communication and computation in a step: TicTac's E and S.

U is the time of all work one after the other, L that of the busiest resource. No step is shorter
than L, and a step that never idles is not longer than U. Both ignore dependencies, so E = 1 may be
out of reach: bound.py computes what is in reach.

Source:
    TicTac (MLSys 2019), section 3.2, and the authors' ``utils.py``: the work of a resource is the
    *union* of its busy intervals, since the same work may be recorded several times.
    Their makespan begins with the first compute op; ours with the first span of any resource.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from hvd_order.base.errors import InvalidUsage

__all__ = ["OverlapEfficiency", "Span", "busy_s", "overlap_of"]


@dataclass(frozen=True)
class Span:
    """A busy interval of a resource, measured or simulated; in seconds on one clock."""

    resource: str
    name: str
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class OverlapEfficiency:
    """A step in three numbers.

    Attributes:
        step_s: duration of the step including waits; m in the paper.
        serial_s: sum of the work of all resources; U.
        busiest_s: the work of the busiest resource; L.
    """

    step_s: float
    serial_s: float
    busiest_s: float

    @property
    def efficiency(self) -> float | None:
        """E = (U - m) / (U - L): 1 is perfect, 0 is no overlap, less than 0 is lost time.

        None if only one resource works: there is nothing to overlap (-1 in the paper's code).
        """
        return self.part_of_possible(self.busiest_s)

    @property
    def speedup(self) -> float:
        """S = (U - L) / L: with 0 no order gains anything, with 1 at best twice the throughput."""
        return (self.serial_s - self.busiest_s) / self.busiest_s if self.busiest_s else 0.0

    def part_of_possible(self, bound_s: float) -> float | None:
        """E with an attainable step time in place of L: 0.93 is 93 % of the possible overlap.

        Args:
            bound_s: lower bound on the step time of any schedule.

        Returns:
            None if the bound permits no overlap.
        """
        possible_s = self.serial_s - bound_s
        # Sums of the same work in different orders differ in the last bits.
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


def overlap_of(spans: Iterable[Span], step_s: float | None = None) -> OverlapEfficiency:
    """Summarises one step.

    Args:
        spans: busy intervals of two or more resources.
        step_s: duration of the step where the spans do not show it: in the steady state, from the
            start of a step to the start of the next. None: from the first begin to the last end.

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
    return OverlapEfficiency(step_s, math.fsum(work), max(work))
