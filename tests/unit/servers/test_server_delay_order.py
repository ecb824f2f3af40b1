"""MLfabric's order of updates on examples that can be followed by hand.

Rows are (slack, seconds): how many others may still be applied before it, and how long it takes.
"""

from __future__ import annotations

from hvd_order._native._core import delay_bounded_order


def test_shortest_first_if_there_is_time() -> None:
    assert delay_bounded_order([(5, 30), (5, 10), (5, 20)]) == ([1, 2, 0], [])


def test_the_oldest_first_if_there_is_not() -> None:
    # The first may be applied now only; the next two within the next four turns.
    assert delay_bounded_order([(0, 90), (3, 80), (3, 70), (5, 1)]) == ([0, 3, 2, 1], [])
    # Two turns later both that are left are theirs.
    assert delay_bounded_order([(1, 80), (1, 70), (3, 1)]) == ([1, 0, 2], [])


def test_late_and_too_many() -> None:
    assert delay_bounded_order([(-2, 1), (0, 9)]) == ([1], [0])
    # Three for two turns: the longest is dropped, which leaves the line free the soonest.
    assert delay_bounded_order([(1, 10), (1, 30), (1, 20)]) == ([0, 2], [1])


def test_nothing_to_do() -> None:
    assert delay_bounded_order([]) == ([], [])
