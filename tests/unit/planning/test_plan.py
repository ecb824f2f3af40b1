"""Choosing slice settings: the model's algebra, and what the tuner keeps."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_order.base.link.link_model import LinkModel
from hvd_order.base.link.slice_settings import (
    SliceSettings,
    arrival_settings,
    best_settings,
    bucket_settings,
)
from hvd_order.base.link.tuner import Tuner, candidates, distinct

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


def test_what_synchronous_workers_push_at_once_fits_the_port_of_a_server() -> None:
    alone = best_settings(ETHERNET, 100 * MIB)
    assert best_settings(ETHERNET, 100 * MIB, pushers=1) == alone
    for workers in (2, 4, 8):
        settings = best_settings(ETHERNET, 100 * MIB, pushers=workers)
        assert workers * settings.slice_bytes <= 512 * 1024
        assert settings.credit_bytes == 4 * settings.slice_bytes
    # Many workers: slices of less than 64 KiB cost more than they spare.
    assert best_settings(ETHERNET, 100 * MIB, pushers=64).slice_bytes == 64 * 1024


def test_a_fast_link_gets_slices_that_cost_less_than_their_bytes() -> None:
    fast = LinkModel(1e-4, 3e-4, 0.8e-9)
    settings = best_settings(fast, 100 * MIB, pushers=8)
    assert settings.slice_bytes * fast.seconds_per_byte >= 0.95 * fast.slice_cost_s


def play(
    tuner: Tuner, step_s: Callable[[SliceSettings, int], float], ranks: int = 2
) -> list[SliceSettings]:
    """Steps that take as long as ``step_s`` says; the settings of each turn."""
    now_s, steps, used = 0.0, 0, []
    while not tuner.done:
        used.append(tuner.slice_settings)
        mine_s = None
        while mine_s is None:
            mine_s = tuner.step_taken(now_s)
            now_s += step_s(tuner.slice_settings, steps)
            steps += 1
        tuner.measured([0.9 * mine_s] * (ranks - 1) + [mine_s])
    return used


FIRST = SliceSettings(MIB, 2 * MIB)
TOTAL = 100 * MIB


def all_candidates() -> list[SliceSettings]:
    return candidates(FIRST, TOTAL, planned=True, cross_iteration=True)


def test_candidates_hold_what_wins_where_latency_or_processors_are_short() -> None:
    tried = all_candidates()
    assert tried[0] == FIRST
    kinds = {(each.agreement, each.cross_iteration, each.slice_bytes) for each in tried}
    assert {
        ("planned", True, MIB),
        ("planned", False, 25 * MIB),
        ("planned", True, 25 * MIB),
    } <= kinds
    assert len(tried) == len(distinct(tried)) == 8
    shared = candidates(FIRST, TOTAL, planned=False, cross_iteration=True)
    assert {each.agreement for each in shared} == {"leader"}
    fixed = candidates(FIRST, TOTAL, planned=True, cross_iteration=False)
    assert not any(each.cross_iteration for each in fixed)


@pytest.mark.parametrize("winner", range(8))
def test_the_clearly_fastest_candidate_is_chosen(winner: int) -> None:
    tried = all_candidates()
    tuner = Tuner(tried)
    used = play(tuner, lambda settings, _: 0.9 if settings == tried[winner] else 1.0)
    assert used[: len(tried)] == tried
    assert tuner.slice_settings == tried[winner]
    assert tuner.chosen_s == pytest.approx(0.9)
    assert len(used) <= 40


def test_equal_candidates_end_with_what_costs_no_more_than_ddp() -> None:
    tuner = Tuner(all_candidates())
    play(tuner, lambda _, __: 1.0)
    assert not tuner.slice_settings.cross_iteration


@pytest.mark.parametrize("spread", [0.05, 0.3])
def test_noise_rarely_chooses_what_is_slower_than_ddp(spread: float) -> None:
    wrong = 0
    for seed in range(200):
        random = Random(seed)
        tuner = Tuner(all_candidates())

        def noisy(settings: SliceSettings, _: int, random: Random = random) -> float:
            mean_s = 1.0 if not settings.cross_iteration else 1.05
            return mean_s * random.lognormvariate(0.0, spread)

        play(tuner, noisy)
        wrong += tuner.slice_settings.cross_iteration
    assert wrong <= 200 * 0.05


def test_a_gain_of_a_few_per_cent_is_found_in_noise() -> None:
    found = 0
    for seed in range(100):
        random = Random(seed)
        tuner = Tuner(all_candidates())

        def noisy(settings: SliceSettings, _: int, random: Random = random) -> float:
            return (0.93 if settings == FIRST else 1.0) * random.lognormvariate(0.0, 0.03)

        play(tuner, noisy)
        found += tuner.slice_settings == FIRST
    assert found >= 90


def test_a_machine_that_slows_down_favours_nobody() -> None:
    tried = all_candidates()
    for winner in (tried[1], tried[0]):
        tuner = Tuner(tried)
        play(
            tuner,
            lambda settings, step, winner=winner: (
                (0.93 if settings == winner else 1.0) * (1 + step / 2000)
            ),
        )
        assert tuner.slice_settings == winner


def test_a_pause_decides_nothing() -> None:
    tried = all_candidates()
    tuner = Tuner(tried)
    play(tuner, lambda settings, step: 50.0 if step % 9 == 4 else 0.8 if settings == FIRST else 1.0)
    assert tuner.slice_settings == FIRST


def test_slices_in_arrival_order_are_large_but_several() -> None:
    assert arrival_settings(TOTAL) == SliceSettings(25 * MIB // 2, 25 * MIB, "arrival")
    assert arrival_settings(16 * MIB) == SliceSettings(2 * MIB, 4 * MIB, "arrival")
    assert arrival_settings(1000 * MIB) == SliceSettings(25 * MIB, 50 * MIB, "arrival")


def test_buckets_are_awaited_and_have_credit_for_all() -> None:
    for total, few in ((TOTAL, True), (TOTAL, False), (MIB, False), (1000 * MIB, False)):
        settings = bucket_settings(total, few)
        assert settings.credit_bytes >= total
        assert settings.slice_bytes <= 25 * MIB
        assert (settings.agreement, settings.cross_iteration) == ("planned", False)


def test_nothing_to_try_is_done_at_once() -> None:
    assert Tuner([]).done
