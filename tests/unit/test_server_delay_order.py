"""MLfabric's order and aggregation on examples that can be followed by hand."""

from __future__ import annotations

import pytest

from hvd_order.errors import InvalidUsage
from hvd_order.server.delay_order import Rates, Update, aggregation_plan, delay_bounded_order


def workers(updates: list[Update]) -> list[int]:
    return [update.worker for update in updates]


def by_size(update: Update) -> float:
    return update.size_bytes


def test_shortest_first_if_there_is_time() -> None:
    waiting = [Update(0, 10, 30), Update(1, 10, 10), Update(2, 10, 20)]
    order, dropped = delay_bounded_order(waiting, 10, 5, by_size)
    assert workers(order) == [1, 2, 0]
    assert not dropped


def test_the_oldest_first_if_there_is_not() -> None:
    # Worker 0 may be applied now only; 1 and 2 within the next four turns.
    waiting = [Update(0, 5, 90), Update(1, 8, 80), Update(2, 8, 70), Update(3, 10, 1)]
    order, dropped = delay_bounded_order(waiting, 10, 5, by_size)
    assert workers(order) == [0, 3, 2, 1]
    assert not dropped
    # Two versions later both turns that are left are theirs.
    order, dropped = delay_bounded_order(waiting[1:], 12, 5, by_size)
    assert workers(order) == [2, 1, 3]
    assert not dropped


def test_late_and_too_many() -> None:
    late = [Update(0, 3, 1), Update(1, 5, 9)]
    assert delay_bounded_order(late, 10, 5, by_size) == ([late[1]], [late[0]])
    # Three for two turns: the longest is dropped, which leaves the link free the soonest.
    waiting = [Update(0, 6, 10), Update(1, 6, 30), Update(2, 6, 20)]
    order, dropped = delay_bounded_order(waiting, 10, 5, by_size)
    assert workers(order) == [0, 2]
    assert workers(dropped) == [1]


def test_bandwidths_decide_what_is_short() -> None:
    rates = Rates(server=100, workers={0: 10, 1: 1000})
    waiting = [Update(0, 1, 50), Update(1, 1, 200), Update(2, 1, 300)]
    order, _ = delay_bounded_order(waiting, 1, 9, rates.to_server_s)
    assert workers(order) == [1, 2, 0]


def test_helpers_work_while_the_server_receives() -> None:
    waiting = [Update(worker, 0, 100) for worker in range(7)]
    rates = Rates(server=100, helpers={0: 100, 1: 100, 7: 100})
    direct = aggregation_plan(waiting, [], rates)
    assert (direct.direct, direct.groups, direct.makespan_s) == (tuple(waiting), (), 7)
    plan = aggregation_plan(waiting, [7], rates)
    # Three updates each, and one for the sum.
    assert len(plan.direct) in (3, 4)
    assert [group.helper for group in plan.groups] == [7]
    assert (plan.makespan_s, plan.direct_s) == (5, 7)
    assert aggregation_plan(waiting, [7, 1, 0], rates).makespan_s == 4


def test_a_slow_helper_is_left_out() -> None:
    waiting = [Update(worker, 0, 100) for worker in range(4)]
    rates = Rates(server=100, helpers={0: 10, 1: 100})
    assert aggregation_plan(waiting, [0], rates).groups == ()
    assert [group.helper for group in aggregation_plan(waiting, [0, 1], rates).groups] == [1]


def test_slow_workers_gain_the_most() -> None:
    waiting = [Update(worker, 0, 100) for worker in range(6)]
    rates = Rates(server=100, helpers={0: 100, 1: 100}, workers=dict.fromkeys(range(6), 10.0))
    plan = aggregation_plan(waiting, [0, 1], rates)
    assert plan.direct_s == 60
    assert plan.makespan_s == 22


def test_nothing_to_do() -> None:
    assert delay_bounded_order([], 3, 0, by_size) == ([], [])
    plan = aggregation_plan([], [1], Rates(1, {1: 1}))
    assert (plan.direct, plan.groups, plan.makespan_s) == ((), (), 0)


def test_mistakes_are_named() -> None:
    with pytest.raises(InvalidUsage, match="least is 0"):
        delay_bounded_order([], 3, -1, by_size)
    with pytest.raises(InvalidUsage, match="worker 4 read version 8, but the server is at 7"):
        delay_bounded_order([Update(4, 8, 1)], 7, 3, by_size)
    with pytest.raises(InvalidUsage, match="have rates"):
        aggregation_plan([Update(0, 0, 1)], [2], Rates(1, {1: 1}))
