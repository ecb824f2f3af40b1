"""E and S: the formulas by hand."""

from __future__ import annotations

import pytest

from hvd_order.base.errors import InvalidUsage
from hvd_order.planning.steps.efficiency import OverlapEfficiency, Span, busy_s, overlap_of


def test_a_step_by_hand() -> None:
    # link      aaaa bbbb
    # compute       xx   yy       U = 8 + 4, L = 8, m = 10
    spans = [
        Span("link", "a", 5.0, 9.0),
        Span("link", "b", 9.0, 13.0),
        Span("compute", "x", 9.0, 11.0),
        Span("compute", "y", 13.0, 15.0),
    ]
    overlap = overlap_of(spans)
    assert overlap == OverlapEfficiency(step_s=10.0, serial_s=12.0, busiest_s=8.0)
    assert overlap.efficiency == 0.5
    assert overlap.speedup == 0.5
    assert overlap.part_of_possible(10.0) == 1.0  # y needs b: there is nothing better
    assert overlap.part_of_possible(9.0) == pytest.approx(2 / 3)


def test_three_resources() -> None:
    spans = [Span("gpu", "x", 0, 4), Span("down", "a", 0, 3), Span("up", "b", 1, 3)]
    assert overlap_of(spans) == OverlapEfficiency(4, 9, 4)
    assert overlap_of(spans).speedup == 5 / 4


def test_what_is_recorded_twice_counts_once() -> None:
    assert busy_s([]) == 0.0
    assert busy_s([(0, 2), (1, 3), (1, 2), (5, 6)]) == 4
    assert busy_s([(0, 9), (1, 2), (3, 4)]) == 9
    # Transfers are often recorded from their request on: they overlap, and the link is busy once.
    spans = [Span("link", "a", 0, 4), Span("link", "b", 0, 8), Span("compute", "x", 4, 12)]
    assert overlap_of(spans) == OverlapEfficiency(12, 16, 8)


def test_in_the_steady_state_the_step_is_given() -> None:
    spans = [Span("link", "a", 1, 5), Span("compute", "x", 0, 4)]
    assert overlap_of(spans).efficiency == pytest.approx(0.75)
    assert overlap_of(spans, step_s=4.0).efficiency == 1.0


def test_lost_time_makes_the_efficiency_negative() -> None:
    assert OverlapEfficiency(step_s=12.0, serial_s=10.0, busiest_s=6.0).efficiency == -0.5


def test_one_resource_has_nothing_to_overlap() -> None:
    overlap = overlap_of([Span("compute", "x", 0, 4)])
    assert overlap.efficiency is None
    assert overlap.speedup == 0.0
    assert OverlapEfficiency(0.0, 0.0, 0.0).speedup == 0.0
    assert OverlapEfficiency(3.0, 3.0, 2.0).part_of_possible(3.0) is None


def test_spans_that_make_no_sense_are_named() -> None:
    with pytest.raises(InvalidUsage, match="'x' on compute begins at 2 s and ends at 1 s"):
        overlap_of([Span("compute", "x", 2, 1)])
    with pytest.raises(InvalidUsage, match="'x' on compute"):
        overlap_of([Span("compute", "x", float("nan"), 1)])
    with pytest.raises(InvalidUsage, match="without spans"):
        overlap_of([])
