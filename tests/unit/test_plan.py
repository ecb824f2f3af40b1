"""Choosing slice settings: the model's algebra, and what the tuner keeps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_order.plan.link.link_model import LinkModel
from hvd_order.plan.link.slice_settings import SliceSettings, arrival_settings, best_settings
from hvd_order.plan.link.tuner import Tuner, Turn, candidates

MIB = 2**20
ETHERNET = LinkModel(
    latency_s=5e-4, slice_cost_s=3e-4, seconds_per_byte=8.7e-9
)  # 2 hosts, 1 Gbit/s


@given(cost_s=st.floats(1e-5, 1e-2), beta=st.floats(1e-11, 1e-6), small=st.integers(2**10, 2**17))
def test_two_streams_give_back_cost_and_bandwidth(cost_s: float, beta: float, small: int) -> None:
    def stream(count: int, size_bytes: int) -> tuple[int, int, float]:
        return count, size_bytes, count * (cost_s + size_bytes * beta)

    link = LinkModel.from_streams(0.0, stream(16, small), stream(4, 8 * small))
    assert link.seconds_per_byte == pytest.approx(beta, rel=1e-6)
    assert link.slice_cost_s == pytest.approx(cost_s, rel=1e-3)


def test_a_measurement_that_makes_no_sense_still_gives_a_link() -> None:
    # The large slices were faster than the small ones: a machine that was busy meanwhile.
    link = LinkModel.from_streams(1e-3, (16, 2**17, 1.0), (4, 2**20, 0.1))
    # No network is faster than what it was seen to do by more than a slice's cost.
    assert link.seconds_per_byte == pytest.approx(0.025 / 2**20)
    settings = best_settings(link, 100 * MIB)
    assert 0 < settings.slice_bytes <= settings.credit_bytes


@pytest.mark.parametrize("total_mib", [8, 30, 100, 500, 1300])
@pytest.mark.parametrize("rate", [0.1, 1, 10])
def test_the_cut_costs_hardly_more_than_any_other(total_mib: int, rate: float) -> None:
    link = LinkModel(ETHERNET.latency_s, ETHERNET.slice_cost_s, ETHERNET.seconds_per_byte / rate)
    alpha_s = max(link.slice_cost_s, link.latency_s)

    def cost_s(slice_bytes: float) -> float:
        slices = total_mib * MIB / slice_bytes
        return slices * alpha_s + 2 * slice_bytes * link.seconds_per_byte

    chosen = best_settings(link, total_mib * MIB)
    least = min(cost_s(64 * 1024 * 2 ** (k / 8)) for k in range(65))
    assert cost_s(chosen.slice_bytes) <= 1.02 * least


def test_a_long_line_gets_more_slices_in_flight() -> None:
    here = best_settings(ETHERNET, 30 * MIB)
    far = best_settings(LinkModel(50e-3, 3e-4, ETHERNET.seconds_per_byte), 30 * MIB)
    assert here.credit_bytes == 2 * here.slice_bytes
    assert far.credit_bytes * ETHERNET.seconds_per_byte >= 50e-3


def play(times: dict[SliceSettings, float], tuner: Tuner, ranks: int = 2) -> list[SliceSettings]:
    """Steps that take as long as the settings in use say; the settings in order of use."""
    now_s, used = 0.0, []
    while not tuner.done:
        used.append(tuner.slice_settings)
        mine = None
        while mine is None:
            mine = tuner.step_taken(now_s)
            now_s += times[tuner.slice_settings]
        faster = Turn(0.9 * mine.median_s, 0.9 * mine.low_s, 0.9 * mine.high_s)
        tuner.measured([faster] * (ranks - 1) + [mine])
    return used


FIRST = SliceSettings(MIB, 2 * MIB)
TOTAL = 100 * MIB


def test_every_candidate_gets_its_turn_and_the_fastest_stays() -> None:
    choices = candidates(FIRST, TOTAL)
    assert choices[0] == FIRST
    assert arrival_settings(TOTAL) in choices
    for winner in choices:
        times = dict.fromkeys(choices, 1.0) | {winner: 0.9}
        tuner = Tuner(choices)
        again = [FIRST, winner] if winner != FIRST else []
        assert play(times, tuner) == [*choices, *again]
        assert tuner.slice_settings == winner


def test_slices_in_arrival_order_are_large_but_several() -> None:
    assert arrival_settings(TOTAL) == SliceSettings(25 * MIB // 2, 25 * MIB, "arrival")
    assert arrival_settings(16 * MIB) == SliceSettings(2 * MIB, 4 * MIB, "arrival")
    assert arrival_settings(1000 * MIB) == SliceSettings(25 * MIB, 50 * MIB, "arrival")


def test_a_rival_within_the_spread_of_the_steps_is_not_faster() -> None:
    first = Turn.of([1.0, 0.8, 1.2, 1.0, 1.1])
    assert (first.median_s, first.low_s, first.high_s) == (1.0, 1.0, 1.1)
    assert not Turn.of([0.9, 1.05, 0.9, 1.0, 0.9]).clearly_faster(first)
    assert Turn.of([0.9, 1.05, 0.9, 0.95, 0.9]).clearly_faster(first)
    assert Turn.slowest([first, Turn(0.5, 0.4, 3.0)]) == Turn(1.0, 1.0, 3.0)


def test_a_rival_that_does_not_win_twice_is_not_chosen() -> None:
    choices = candidates(FIRST, TOTAL)
    tuner = Tuner(choices)
    for seconds in (1.0, 1.1, 0.8, 1.1, 1.0):
        while tuner.step_taken(0.0) is None:
            pass
        tuner.measured([Turn(seconds, seconds, seconds)])
        assert not tuner.done
    assert tuner.slice_settings == choices[2]
    while tuner.step_taken(0.0) is None:
        pass
    assert tuner.measured([Turn(0.99, 0.99, 0.99)]) == FIRST
    assert tuner.done


def test_a_difference_within_the_noise_changes_nothing() -> None:
    choices = candidates(FIRST, TOTAL)
    tuner = Tuner(choices)
    play({settings: 1.0 - 0.005 * i for i, settings in enumerate(choices)}, tuner)
    assert tuner.slice_settings == FIRST


def test_one_slow_step_decides_nothing() -> None:
    choices = candidates(FIRST, TOTAL)
    tuner = Tuner(choices)
    now_s = 0.0
    for number in range(1000):
        if tuner.done:
            break
        mine = tuner.step_taken(now_s)
        now_s += 50.0 if number % 9 == 4 else 1.0
        if mine is not None:
            tuner.measured([mine])
    assert tuner.done
    assert tuner.slice_settings == FIRST


def test_nothing_to_try_is_done_at_once() -> None:
    assert Tuner([]).done
