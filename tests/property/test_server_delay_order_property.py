"""Delays are bounded, nothing is dropped that fits, and no plan is slower than sending directly."""

from __future__ import annotations

from itertools import combinations, permutations

import pytest
from helpers.property_cases import cases
from hypothesis import given
from hypothesis import strategies as st

from hvd_order.server.delay_order import (
    AggregationPlan,
    Rates,
    Update,
    aggregation_plan,
    delay_bounded_order,
)

VERSION = 20


def updates(most: int) -> st.SearchStrategy[list[Update]]:
    """Few different ages and sizes, so that ties and tight places are common."""
    return st.lists(
        st.tuples(st.integers(0, 6), st.sampled_from([0, 1, 2, 3, 5, 8, 13])), max_size=most
    ).map(lambda rows: [Update(i, VERSION - age, size) for i, (age, size) in enumerate(rows)])


def length(update: Update) -> float:
    return update.size_bytes


def in_time(order: tuple[Update, ...] | list[Update], bound: int) -> bool:
    return all(VERSION + turn - each.read_version <= bound for turn, each in enumerate(order))


def waiting_s(order: tuple[Update, ...] | list[Update]) -> float:
    """The sum of the times at which updates arrive, one after the other."""
    return sum((len(order) - turn) * length(each) for turn, each in enumerate(order))


@cases(400)
@given(waiting=updates(40), bound=st.integers(0, 30))
def test_no_update_is_applied_too_late(waiting: list[Update], bound: int) -> None:
    order, dropped = delay_bounded_order(waiting, VERSION, bound, length)
    assert in_time(order, bound)
    assert sorted(order + dropped, key=lambda u: u.worker) == waiting
    # Nothing that is dropped could be added: turns are short of updates as urgent.
    for each in dropped:
        by_age = sorted([*order, each], key=lambda u: u.read_version)
        assert not in_time(by_age, bound)


@cases(250)
@given(waiting=updates(6), bound=st.integers(0, 10))
def test_as_good_as_the_best_of_all_orders(waiting: list[Update], bound: int) -> None:
    order, _ = delay_bounded_order(waiting, VERSION, bound, length)
    most, shortest = 0, 0.0
    for count in range(len(waiting), -1, -1):
        sets = [
            s
            for s in combinations(waiting, count)
            if any(in_time(p, bound) for p in permutations(s))
        ]
        if sets:
            most, shortest = count, min(sum(map(length, s)) for s in sets)
            break
    # As many as possible, of such sets the shortest ...
    assert len(order) == most
    assert sum(map(length, order)) == shortest
    # ... and of its orders the one in which updates arrive soonest.
    assert waiting_s(order) == min(
        waiting_s(other) for other in permutations(order) if in_time(other, bound)
    )


@st.composite
def links(draw: st.DrawFn) -> Rates:
    rate = st.sampled_from([1.0, 2.0, 5.0])
    return Rates(
        draw(rate),
        draw(st.dictionaries(st.integers(0, 9), rate, max_size=3)),
        draw(st.dictionaries(st.integers(0, 5), st.sampled_from([0.5, 1.0]), max_size=6)),
    )


def finished_s(plan: AggregationPlan, rates: Rates) -> float:
    """When the server has everything, counted transfer by transfer."""
    free_s = sum(rates.to_server_s(each) for each in plan.direct)
    for group in plan.groups:
        there_s = sum(rates.to_helper_s(each, group.helper) for each in group.members)
        largest = max(each.size_bytes for each in group.members)
        rate = min(rates.server, rates.helpers[group.helper])
        free_s = max(free_s, there_s) + largest / rate
    return free_s


def best_s(waiting: list[Update], helpers: list[int], rates: Rates) -> float:
    """Of all ways to cut the order into a first part and one run each for some helpers."""

    def after(free_s: float, rest: list[Update], left: list[int]) -> float:
        if not rest:
            return free_s
        options = []
        for k, helper in enumerate(left):
            for count in range(1, len(rest) + 1):
                there_s = sum(rates.to_helper_s(each, helper) for each in rest[:count])
                largest = max(each.size_bytes for each in rest[:count])
                end_s = max(free_s, there_s) + largest / min(rates.server, rates.helpers[helper])
                options.append(after(end_s, rest[count:], left[k + 1 :]))
        return min(options, default=float("inf"))

    return min(
        after(sum(map(rates.to_server_s, waiting[:first])), waiting[first:], helpers)
        for first in range(len(waiting) + 1)
    )


@cases(200)
@given(waiting=updates(6), rates=links())
def test_the_best_of_all_aggregations(waiting: list[Update], rates: Rates) -> None:
    helpers = list(rates.helpers)
    plan = aggregation_plan(waiting, helpers, rates)
    assert plan.makespan_s == pytest.approx(best_s(waiting, helpers, rates))


@cases(300)
@given(waiting=updates(30), rates=links(), bound=st.integers(0, 30))
def test_aggregation_loses_nothing_and_delays_nobody(
    waiting: list[Update], rates: Rates, bound: int
) -> None:
    order, _ = delay_bounded_order(waiting, VERSION, bound, rates.to_server_s)
    plan = aggregation_plan(order, list(rates.helpers), rates)
    assert [*plan.direct, *(each for group in plan.groups for each in group.members)] == order
    assert [group.helper for group in plan.groups] == [
        helper for helper in rates.helpers if helper in {group.helper for group in plan.groups}
    ]
    assert plan.makespan_s <= plan.direct_s
    assert plan.makespan_s == pytest.approx(finished_s(plan, rates))
    applied = VERSION + len(plan.direct)
    for group in plan.groups:
        assert applied - min(each.read_version for each in group.members) <= bound
        applied += len(group.members)
