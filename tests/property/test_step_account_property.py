"""The account of steps: parts that close, clocks, and who is named slow."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_order.base.account.clock_offset import clock_offset
from hvd_order.base.account.exposed import SlicesOfStep, WaitedSlices, explain, late_layer
from hvd_order.base.account.replay import saved_ns
from hvd_order.base.account.slow_ranks import WINDOW, RankRow, SlowRank
from hvd_order.base.account.step_parts import StepMarks, overlap, parts_of, union, within

times = st.integers(1, 10_000)


@st.composite
def disjoint(draw: st.DrawFn) -> list[tuple[int, int]]:
    ends = sorted(draw(st.lists(times, max_size=12, unique=True)))
    return list(zip(ends[0::2], ends[1::2], strict=False))


@given(disjoint(), disjoint(), st.lists(times, min_size=6, max_size=6), st.booleans())
def test_parts_of_a_step_close(
    waits: list[tuple[int, int]],
    updates: list[tuple[int, int]],
    marks: list[int],
    sees_all: bool,
) -> None:
    begin, backward, called, returned, read, end = sorted(marks)
    apart = [each for each in updates if within(waits, *each) == 0]
    parts = parts_of(
        StepMarks(
            begin,
            backward if sees_all else 0,
            called,
            returned,
            read if sees_all else 0,
            end,
            [(t0, t1, 0) for t0, t1 in waits],
            apart,
        )
    )
    total = parts.compute_s + parts.exposed_s + parts.update_s + parts.host_s
    assert total == pytest.approx(parts.step_s, abs=1e-12)
    assert min(parts.forward_s, parts.backward_s, parts.loader_s, parts.rest_s) >= 0
    assert parts.has_loader == sees_all


@given(disjoint(), st.lists(st.tuples(times, times)))
def test_union_has_the_same_moments(
    one: list[tuple[int, int]], spans: list[tuple[int, int]]
) -> None:
    merged = union([*one, *spans])
    assert all(a[1] < b[0] for a, b in itertools.pairwise(merged))
    for moment in {t for span in [*one, *spans] for t in span}:
        covered = any(t0 <= moment < t1 for t0, t1 in [*one, *spans])
        assert any(t0 <= moment < t1 for t0, t1 in merged) == covered


def test_overlap_as_holistic_trace_analysis_has_it() -> None:
    # Communication [0, 10], computation [2, 6] and [8, 12]: 60 %.
    assert overlap([(0, 5), (3, 10)], [(0, 2), (6, 8)]) == pytest.approx(0.6)
    assert overlap([], [(0, 2)]) == 1.0


# ---- clocks --------------------------------------------------------------------------------------


@st.composite
def passages(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """When two ranks enter and leave: nobody leaves before both have entered."""
    first, second, third, fourth = sorted(draw(st.integers(0, 10**7)) for _ in range(4))
    enter = (first, second) if draw(st.booleans()) else (second, first)
    leave = (third, fourth) if draw(st.booleans()) else (fourth, third)
    return (*enter, *leave)


@given(st.integers(-(10**12), 10**12), st.lists(passages(), min_size=1, max_size=5))
def test_the_offset_lies_between_its_bounds(
    offset: int, passages: Sequence[tuple[int, int, int, int]]
) -> None:
    mine = [(10**13 + offset + a, 10**13 + offset + c) for a, _, c, _ in passages]
    of_rank_0 = [(10**13 + b, 10**13 + d) for _, b, _, d in passages]
    found = clock_offset(mine, of_rank_0)
    assert found.low_ns <= offset <= found.high_ns
    assert abs(found.ns - offset) <= found.error_ns
    again = clock_offset(mine, of_rank_0, before=found)
    assert again.low_ns <= offset <= again.high_ns
    assert again.error_ns <= found.error_ns


def test_a_clock_that_was_set_is_compared_anew() -> None:
    before = clock_offset([(0, 10)], [(0, 10)])
    after = clock_offset([(10**9, 10**9 + 10)], [(0, 10)], before)
    assert abs(after.ns - 10**9) <= 10


# ---- why readers waited --------------------------------------------------------------------------

WHOLE = WaitedSlices(last=[[0], [1]], first=[[0], [1]], names=["a", "b"])


def test_the_vector_of_the_definitions() -> None:
    # Ready at 10, 13, 10; transfer 2; a reader at 11 that ends at 15.
    slices = SlicesOfStep([10, 1], [10, 2], [15, 3], [13, 1], [1, 0], [10, 1])
    exposed = explain([(11, 15, 0)], slices, WHOLE)
    assert (exposed.late, exposed.queue, exposed.transfer) == (2, 0, 2)
    assert exposed.late_of == {1: 2}


def test_what_was_sent_before_a_more_urgent_slice_is_an_inversion() -> None:
    # Slice 0 is ready everywhere at 10; slice 1 is sent from 11 to 15, slice 0 from 15 to 18.
    slices = SlicesOfStep([10, 5], [15, 11], [18, 15], [10, 5], [0, 0], [9, 5])
    exposed = explain([(10, 18, 0)], slices, WHOLE)
    assert (exposed.late, exposed.queue, exposed.transfer) == (0, 5, 3)
    assert exposed.inversion == 4


def test_the_second_half_of_a_sum_is_not_late() -> None:
    halves = WaitedSlices(last=[[1]], first=[[0], [0]], names=["s", "g"])
    # The reduce-scatter is ready everywhere at 6 and travels from 7 to 10, the all-gather from 12.
    slices = SlicesOfStep([5, 10], [7, 12], [10, 14], [6, 10], [1, 1], [5, 10])
    exposed = explain([(4, 14, 0)], slices, halves)
    assert (exposed.late, exposed.queue, exposed.transfer) == (2, 1 + 2, 3 + 2)


@given(
    disjoint(),
    st.lists(
        st.tuples(times, times, times, times, st.integers(0, 3), times), min_size=2, max_size=2
    ),
)
def test_causes_add_up_to_the_waits(
    waits: list[tuple[int, int]], slices: list[tuple[int, ...]]
) -> None:
    columns = SlicesOfStep(*([each[i] for each in slices] for i in range(6)))
    exposed = explain([(a, b, a % 2) for a, b in waits], columns, WHOLE)
    total = exposed.late + exposed.queue + exposed.transfer
    assert total == sum(b - a for a, b in waits)
    assert 0 <= exposed.inversion <= exposed.queue
    assert sum(exposed.late_of.values()) == exposed.late


def test_a_wait_for_an_earlier_transfer_blames_nobody() -> None:
    # The slice was ready again at 20, after the wait had ended.
    slices = SlicesOfStep([20, 5], [21, 6], [25, 8], [22, 5], [1, 0], [20, 5])
    exposed = explain([(10, 15, 0)], slices, WHOLE)
    assert (exposed.late, exposed.queue, exposed.transfer) == (0, 0, 5)


# ---- what a step would be ------------------------------------------------------------------------


def late_step(second: list[int]) -> tuple[StepMarks, SlicesOfStep]:
    """Slice 1 is ready first, at 60; slice 0 at 100. A transfer takes 10. The forward pass is from
    55 to 140, so the reader of slice 0 waits until 110, that of slice 1 at 125 not at all.
    """
    marks = StepMarks(1, 40, 50, 50, 55, 140, waits=[(55, 110, 0)])
    return marks, SlicesOfStep([50, 30], [100, 60], [110, 70], [100, 60], [1, 1], second)


@pytest.mark.parametrize(
    ("second", "by_need", "saved"),
    [
        ([100, 60], True, 0),  # another rank is as late
        ([50, 30], True, 50),  # sent from 50 to 60
        ([50, 50], True, 50),  # slice 0 goes first, and slice 1 is there in time
        ([50, 50], False, 40),  # behind slice 1
        ([40, 20], True, 55),  # there before its reader
    ],
)
def test_a_step_without_the_late_rank(second: list[int], by_need: bool, saved: float) -> None:
    marks, times = late_step(second)
    assert saved_ns(marks, times, WHOLE, second, by_need) == saved


def test_transfers_that_a_late_rank_hid_come_to_light() -> None:
    # Slice 1 takes 50: from 60 to 100 beside the late backward pass, and on to 110.
    marks = StepMarks(1, 40, 50, 50, 55, 140, waits=[(55, 120, 0)])
    times = SlicesOfStep([50, 30], [110, 60], [120, 110], [100, 60], [1, 1], [50, 50])
    # Slice 0 goes from 50 to 60, slice 1 from 60 to 110. Its reader came at 130.
    assert saved_ns(marks, times, WHOLE, [50, 50], True) == 130 - 110


def test_a_step_with_a_faster_link() -> None:
    marks, times = late_step([50, 30])
    assert saved_ns(marks, times, WHOLE, times.ready_last, True) == 0
    assert saved_ns(marks, times, WHOLE, times.ready_last, True, duration=0.5) == 5


def test_a_late_layer_stands_out_and_a_slow_pass_has_none() -> None:
    usual = [100, 80, 60, 40, 20]  # by slice; the last layer's gradient comes first
    assert late_layer([150, 130, 110, 40, 20], usual) == 2
    assert late_layer([200, 160, 120, 80, 40], usual) is None
    assert late_layer(usual, usual) is None


# ---- who is slow ---------------------------------------------------------------------------------


def row(rank: int, steps: int, numbers: random.Random, slow: int = -1, **more: float) -> RankRow:
    """Steps of about 100 ms; the latest of 4 ranks is one at random, or the slow one by 40 ms."""
    latest = [slow if slow >= 0 else numbers.randrange(4) for _ in range(steps)]
    late = [
        0.0 if who == rank else (0.04 if slow >= 0 else 0.005) * numbers.uniform(0.8, 1.2)
        for who in latest
    ]
    parts = {
        name: 0.02 * numbers.uniform(0.95, 1.05)
        for name in ("backward pass", "host", "update", "loader", "forward pass")
    }
    return RankRow(
        step_s=[0.1 * numbers.uniform(0.95, 1.05) for _ in range(steps)],
        latest=[who if who != rank else -1 for who in latest],
        latest_s=late,
        saved_s=late,
        parts_s=parts,
        link_s=0.03,
        run_queue_s=more.get("run_queue_s", 0.0),
        sends_per_s=more.get("sends_per_s", 1e8 * numbers.uniform(0.9, 1.1)),
        sends_to=int(more.get("sends_to", -1)),
    )


def test_ten_thousand_healthy_steps_raise_no_alarm() -> None:
    numbers, slow = random.Random(1), SlowRank()
    for _ in range(1000):
        rows = [row(rank, 10, numbers, sends_to=RING[rank]) for rank in range(4)]
        assert slow.seen(rows, [0, 1, 2, 3]) == []


@pytest.mark.parametrize("cause", ["backward pass", "host", "update", "loader", "forward pass"])
def test_a_slow_rank_is_named_once_and_ends_once(cause: str) -> None:
    numbers, slow = random.Random(2), SlowRank()
    said = []
    for talk in range(12):
        is_slow = 2 <= talk < 7
        rows = [row(rank, 10, numbers, slow=2 if is_slow else -1) for rank in range(4)]
        if is_slow:
            rows[2] = replace(rows[2], parts_s={**rows[2].parts_s, cause: 0.06})
        for found, begins in slow.seen(rows, [0, 1, 2, 3]):
            said.append((talk, found.place, found.cause, begins))
    assert [each[1:] for each in said] == [(2, cause, True), (2, cause, False)]
    assert (said[0][0] - 2 + 1) * 10 <= 2 * WINDOW  # steps until it is named


def test_another_rank_is_slow_at_once() -> None:
    numbers, slow = random.Random(6), SlowRank()
    said = []
    for talk in range(8):
        rows = [row(rank, 10, numbers, slow=1 if talk < 4 else 3) for rank in range(4)]
        said += [(talk, found.place, begins) for found, begins in slow.seen(rows, [0, 1, 2, 3])]
    assert said == [(1, 1, True), (4, 1, False), (5, 3, True)]


def test_a_rank_whose_threads_wait_for_cores() -> None:
    numbers, slow = random.Random(3), SlowRank()
    for _ in range(2):
        rows = [row(rank, 10, numbers, slow=1) for rank in range(4)]
        rows[1] = replace(
            rows[1], parts_s={**rows[1].parts_s, "forward pass": 0.06}, run_queue_s=0.03
        )
        slow.seen(rows, [0, 0, 0, 0])
    found = slow.present
    assert found is not None
    assert (found.place, found.cause) == (1, "cores")


RING = {0: 3, 1: 0, 2: 1, 3: 2}  # who sends to whom


@pytest.mark.parametrize("ways", ["in and out", "out"])
def test_a_slow_link_is_named_by_its_host(ways: str) -> None:
    numbers, slow = random.Random(4), SlowRank()
    for _ in range(2):
        rows = [row(rank, 10, numbers, sends_to=RING[rank]) for rank in range(4)]
        for rank in (1, 2) if ways == "in and out" else (1,):
            rows[rank] = replace(rows[rank], sends_per_s=2.5e7)
        slow.seen(rows, range(4))
    found = slow.present
    assert found is not None
    assert (found.cause, found.host, found.place) == ("link", 1, 1)


def test_rates_that_come_and_go_are_no_slow_link() -> None:
    numbers, slow = random.Random(7), SlowRank()
    for talk in range(6):
        rows = [row(rank, 10, numbers, sends_to=RING[rank]) for rank in range(4)]
        if talk % 2:  # too little was sent there to tell
            rows[1] = replace(rows[1], sends_to=-1, sends_per_s=0.0)
        assert slow.seen(rows, range(4)) == []


def test_what_clocks_cannot_tell_apart_is_no_delay() -> None:
    numbers, slow = random.Random(5), SlowRank()
    for _ in range(4):
        rows = [row(rank, 10, numbers, slow=1) for rank in range(4)]
        rows = [replace(each, clock_error_s=0.05) for each in rows]
        assert slow.seen(rows, [0, 0, 0, 0]) == []
