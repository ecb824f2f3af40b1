"""No update is applied too late, nothing is dropped that fits, and no order is better."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, permutations

from helpers.property_cases import cases
from hypothesis import given
from hypothesis import strategies as st

from hvd_order._native._core import delay_bounded_order

Update = tuple[int, float]  # slack, seconds


def updates(most: int) -> st.SearchStrategy[list[Update]]:
    """Few different slacks and lengths, so that ties and tight places are common."""
    return st.lists(
        st.tuples(st.integers(-2, 8), st.sampled_from([0.0, 1.0, 2.0, 3.0, 5.0, 8.0, 13.0])),
        max_size=most,
    )


def in_time(order: Sequence[Update]) -> bool:
    return all(turn <= slack for turn, (slack, _) in enumerate(order))


def total_s(order: Sequence[Update]) -> float:
    return sum(seconds for _, seconds in order)


def waiting_s(order: Sequence[Update]) -> float:
    """The sum of the times at which updates arrive, one after the other."""
    return sum((len(order) - turn) * seconds for turn, (_, seconds) in enumerate(order))


@cases(400)
@given(waiting=updates(40))
def test_no_update_is_applied_too_late(waiting: list[Update]) -> None:
    order, late = delay_bounded_order(waiting)
    made = [waiting[i] for i in order]
    assert in_time(made)
    assert sorted(order + late) == list(range(len(waiting)))
    assert late == sorted(late)
    # Nothing that is dropped could be added: turns are short of updates as urgent.
    for i in late:
        assert not in_time(sorted([*made, waiting[i]]))


@cases(250)
@given(waiting=updates(6))
def test_as_good_as_the_best_of_all_orders(waiting: list[Update]) -> None:
    order = [waiting[i] for i in delay_bounded_order(waiting)[0]]
    most, shortest = 0, 0.0
    for count in range(len(waiting), -1, -1):
        sets = [s for s in combinations(waiting, count) if any(map(in_time, permutations(s)))]
        if sets:
            most, shortest = count, min(map(total_s, sets))
            break
    # As many as possible, of such sets the shortest ...
    assert len(order) == most
    assert total_s(order) == shortest
    # ... and of its orders the one in which updates arrive soonest.
    assert waiting_s(order) == min(map(waiting_s, filter(in_time, permutations(order))))
