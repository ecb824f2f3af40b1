"""When a change of step times counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from hvd_order.base.link.drift_detector import INTERVAL_S, LEAST_STEPS, Drift, DriftDetector


def run(
    detector: DriftDetector, step_s: Callable[[int], float], steps: int
) -> list[tuple[int, Drift | None]]:
    """The steps at which two equal ranks compared, and what came of it."""
    now_s, looks = 100.0, []
    for step in range(steps):
        now_s += step_s(step)
        seen_s = detector.step_taken(now_s)
        if seen_s is not None:
            looks.append((step, detector.compared([seen_s, seen_s])))
            if looks[-1][1] is not None:
                break
    return looks


def drifts_of(step_s: Callable[[int], float]) -> list[Drift]:
    return drifts(run(DriftDetector(0.1), step_s, 3000))


def drifts(looks: Iterable[tuple[int, Drift | None]]) -> list[Drift]:
    return [drift for _, drift in looks if drift is not None]


def test_steady_steps_are_looked_at_twice_a_minute_and_change_nothing() -> None:
    looks = run(DriftDetector(0.1), lambda _: 0.1, 1000)
    assert [step for step, _ in looks] == [299, 599, 899]
    assert INTERVAL_S / 0.1 == 300
    assert drifts(looks) == []


@pytest.mark.parametrize(
    ("factor", "limit"), [(1.3, True), (0.7, True), (1.1, False), (0.9, False)]
)
def test_a_clear_change_in_either_direction_counts_when_it_lasts(
    factor: float, limit: bool
) -> None:
    looks = run(DriftDetector(0.1), lambda step: 0.1 * (factor if step >= 250 else 1.0), 1500)
    found = drifts(looks)
    assert bool(found) == limit
    if found:
        assert found[0].before_s == 0.1
        assert found[0].now_s == pytest.approx(0.1 * factor)
        assert looks[-1][0] == 599  # seen at 299 as well


def test_neither_single_steps_nor_one_slow_look_count() -> None:
    assert drifts_of(lambda step: 10.0 if step % 10 == 0 else 0.1) == []
    slow_once = range(274, 300)
    assert drifts_of(lambda step: 0.2 if step in slow_once else 0.1) == []
    slow_twice = {*slow_once, *range(874, 900)}  # and as usual at 599
    assert drifts_of(lambda step: 0.2 if step in slow_twice else 0.1) == []


def test_slower_and_then_faster_is_no_trend() -> None:
    times = {299: 0.2, 599: 0.05, 899: 0.2, 1199: 0.05}

    def step_s(step: int) -> float:
        return next((s for end, s in times.items() if end - 30 < step <= end), 0.1)

    assert drifts(run(DriftDetector(0.1), step_s, 1200)) == []


def test_an_account_of_few_steps_is_replaced_at_once() -> None:
    detector = DriftDetector(0.1, expected=False)
    assert detector.expected_s is None
    looks = run(detector, lambda _: 0.15, 700)
    assert [step for step, _ in looks] == [27, 327, 627]
    assert detector.expected_s == pytest.approx(0.15)
    assert drifts(looks) == []


def test_short_steps_and_patience_stretch_the_interval() -> None:
    assert run(DriftDetector(10.0), lambda _: 10.0, LEAST_STEPS)[-1][0] == LEAST_STEPS - 1
    looks = run(DriftDetector(0.1, patience=4), lambda _: 0.1, 2400)
    assert [step for step, _ in looks] == [1199, 2399]


def test_the_slowest_rank_counts() -> None:
    detector = DriftDetector(0.1)
    assert detector.compared([0.1, 0.13]) is None
    assert detector.compared([0.13, 0.1]) == Drift(0.1, 0.13)


def test_slices_that_are_often_late_in_a_planned_order_count() -> None:
    detector = DriftDetector(0.1)
    assert detector.compared([0.1], hold_ups=3.0) is None
    assert detector.compared([0.1], hold_ups=4.0) is None
    assert detector.compared([0.1], hold_ups=6.0) is None
    assert detector.compared([0.1], hold_ups=6.0) == Drift(0.1, 0.1, late=True)
