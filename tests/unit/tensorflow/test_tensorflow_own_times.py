"""What counts as an operation's time in a worker's trace; times in picoseconds."""

from __future__ import annotations

import pytest
from helpers.training.keras_jobs import MARKS

pytestmark = MARKS


@pytest.mark.parametrize(
    ("intervals", "ready", "took"),
    [
        ([("a", 100, 110)], {}, {"a": 10}),
        ([("a", 100, 110), ("b", 115, 120)], {}, {"a": 10, "b": 10}),
        ([("a", 100, 110), ("b", 115, 120)], {"b": 113}, {"a": 10, "b": 7}),
        ([("a", 100, 110), ("b", 115, 120)], {"b": 130}, {"a": 10, "b": 5}),
        ([("a", 100, 110)], {"a": 96}, {"a": 14}),
        ([("a", 100, 120), ("b", 110, 130)], {}, {"a": 15, "b": 15}),
        ([("a", 100, 110), ("a", 110, 112), ("b", 112, 112)], {}, {"a": 12, "b": 0}),
        ([], {}, {}),
    ],
)
def test_all_together_are_the_time_at_work(
    intervals: list[tuple[str, int, int]], ready: dict[str, int], took: dict[str, int]
) -> None:
    from hvd_order.tensorflow.strategy.own_times import own_times
    from hvd_order.tensorflow.strategy.trace import Timed

    each = [(name, Timed(begin, end)) for name, begin, end in intervals]
    assert own_times(each, ready) == took
