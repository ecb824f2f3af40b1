"""The simulator as Python sees it; hand-computed cases of the core are in tests/cpp."""

from __future__ import annotations

import pytest

from hvd_order._native._core import SliceLayout
from hvd_order.base.errors import InvalidUsage
from hvd_order.planning.predict.simulate import (
    AllReduceScenario,
    StepWorkload,
    TransferSchedule,
    ddp,
    simulate,
)

KIB = 1024
ONE_AT_A_TIME = TransferSchedule(64, 64)
LINK = AllReduceScenario(latency_s=0.0, seconds_per_byte=1 / 64)  # 64 bytes a second


def two_layers() -> StepWorkload:
    # As in tests/cpp/simulate_test.cc.
    return StepWorkload.chain(["a", "b"], [1.0, 1.0], [2.0, 2.0], [[3 * 64], [4 * 64]])


def test_a_chain_by_hand() -> None:
    result = simulate(two_layers(), LINK, ONE_AT_A_TIME, steps=4, recorded=2)
    assert result.step_s == pytest.approx([6, 10, 10, 10])
    assert result.steady_s == pytest.approx(10)
    before, last = result.ops()
    assert [op.name for op in last] == ["a forward", "b forward", "b backward", "a backward"]
    assert [op.wait_s for op in last] == pytest.approx([3, 1, 0, 0])
    assert last[0].could_start_s == pytest.approx(before[-1].end_s)
    slices = result.slices()[0]
    assert [piece.name for piece in slices[:3]] == ["a[0]", "a[1]", "a[2]"]
    assert slices[0].issued_s == pytest.approx(before[-1].end_s)
    assert slices[2].finished_s == pytest.approx(last[0].start_s)
    assert result.compute_busy_s() == pytest.approx([6])
    assert result.link_busy_s() == pytest.approx(7)
    assert result.sent_bytes == pytest.approx(7 * 64)
    assert result.ranks() == [(1.0, 2)]
    begin, end = result.link_busy()[-1]
    assert (end - begin, end) == pytest.approx((7, result.end_s))


def test_layers_may_have_several_parameters_or_none() -> None:
    work = StepWorkload.chain(["a", "b", "c"], [1, 1, 1], [1, 1, 1], [[100, 20], [], [16]], 0.01)
    assert work.parameter_bytes == [100, 20, 16]
    layout = work.layout(64 * KIB)
    assert isinstance(layout, SliceLayout)
    assert layout.slice_name(0) == "a.0..c"
    assert layout.buffer_bytes == [112 + 32 + 16]  # padded as real buffers are
    result = simulate(work, LINK, TransferSchedule(64 * KIB, 64 * KIB), steps=3, recorded=1)
    # One slice, ready at the end of backward: all is waited for, then updated.
    assert result.step_s[-1] == pytest.approx(6 + 160 / 64 + 1.36)
    assert [update.parameter for update in result.updates()] == [0, 1, 2]


def test_ddp_waits_for_its_buckets() -> None:
    work, schedule = ddp(two_layers(), bucket_bytes=25 * KIB, first_bytes=64)
    assert work.parameter_bytes == [4 * 64, 3 * 64]
    result = simulate(work, LINK, schedule, steps=3)
    assert result.step_s == pytest.approx([11, 11, 11])  # b travels 4-8, a 8-11
    one, schedule = ddp(two_layers())
    assert one.parameter_bytes == [7 * 64]
    assert simulate(one, LINK, schedule, steps=2).step_s == pytest.approx([13, 13])


@pytest.mark.parametrize("ratio", [0.25, 0.5, 1.0, 4 / 3, 2.0, 4.0, 8.0])
def test_the_fluid_model_says_when_order_helps_and_when_fewer_bytes_do(ratio: float) -> None:
    """docs/theory.md, "When order, when fewer bytes"; here in units of the forward pass."""
    layers, slices = 60, 4
    size = 64 * slices
    names = [f"l{i}" for i in range(layers)]
    work = StepWorkload.chain(
        names, [1 / layers] * layers, [2 / layers] * layers, [[size]] * layers
    )

    def step_s(communication: float, with_ddp: bool = False) -> float:
        link = AllReduceScenario(0.0, communication / (layers * size))
        step, schedule = ddp(work, size, size) if with_ddp else (work, ONE_AT_A_TIME)
        return simulate(step, link, schedule, steps=6).steady_s

    forward, backward, communication = 1.0, 2.0, 3 * ratio
    close = 2 * max(communication, 3.0) / layers  # a layer at each end
    assert step_s(communication, with_ddp=True) == pytest.approx(
        forward + max(backward, communication), abs=close
    )
    assert step_s(communication) == pytest.approx(max(forward + backward, communication), abs=close)
    assert step_s(communication * 8.125 / 32) == pytest.approx(
        max(forward + backward, communication * 8.125 / 32), abs=close
    )


def test_a_scenario_that_cannot_be_is_refused() -> None:
    # Other mistakes: tests/cpp/simulate_test.cc and simulate_split_test.cc.
    with pytest.raises(InvalidUsage, match="no ranks"):
        simulate(two_layers(), LINK, ONE_AT_A_TIME, ranks=0)
    planned = TransferSchedule(64, 128, "planned", "planned", plan=range(7), split=True)
    with pytest.raises(InvalidUsage, match=r"each of the 15 slices once; it lists 7"):
        simulate(two_layers(), LINK, planned, clipped=True)


def test_a_word_that_is_none_of_those_expected_is_refused() -> None:
    # A typing error must not silently simulate something else.
    with pytest.raises(InvalidUsage, match="order is 'programme'; expected one of program, ready"):
        simulate(two_layers(), LINK, ONE_AT_A_TIME, order="programme")  # type: ignore[arg-type]
    with pytest.raises(InvalidUsage, match="policy is 'fifo'; expected one of priority, arrival"):
        simulate(two_layers(), LINK, TransferSchedule(64, 64, "fifo"))  # type: ignore[arg-type]
