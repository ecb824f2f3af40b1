"""The simulator as Python sees it; hand-computed cases of the core are in tests/cpp."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hvd_order._native._core import SliceLayout
from hvd_order.base.errors import InvalidUsage
from hvd_order.planning.predict.simulate import (
    AllReduce,
    Op,
    Parameter,
    ParameterServers,
    Schedule,
    Simulated,
    Workload,
    ddp,
    simulate,
)

KIB = 1024
ONE_AT_A_TIME = Schedule(64, 64)
LINK = AllReduce(latency_s=0.0, seconds_per_byte=1 / 64)  # 64 bytes a second


def two_layers() -> Workload:
    # The case that tests/cpp/simulate_test.cc computes by hand.
    return Workload.chain(["a", "b"], [1.0, 1.0], [2.0, 2.0], [[3 * 64], [4 * 64]])


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
    assert result.link_busy_s() == pytest.approx({"link": 7})
    assert result.sent_bytes == pytest.approx(7 * 64)
    assert result.ranks() == [(1.0, 2)]
    begin, end = result.link_busy()["link"][-1]
    assert (end - begin, end) == pytest.approx((7, result.end_s))


def test_layers_may_have_several_parameters_or_none() -> None:
    work = Workload.chain(["a", "b", "c"], [1, 1, 1], [1, 1, 1], [[100, 20], [], [16]], 0.01)
    assert work.parameter_bytes == [100, 20, 16]
    layout = work.layout(64 * KIB)
    assert isinstance(layout, SliceLayout)
    assert layout.slice_name(0) == "a.0..c"
    assert layout.buffer_bytes == [112 + 32 + 16]  # padded as real buffers are
    result = simulate(work, LINK, Schedule(64 * KIB, 64 * KIB), steps=3, recorded=1)
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


def test_merged_gradients_travel_together() -> None:
    work = two_layers().merged([[0, 1]])
    assert work.parameter_bytes == [7 * 64]
    result = simulate(work, LINK, Schedule(7 * 64, 7 * 64), steps=3)
    assert result.steady_s == pytest.approx(6 + 7)


def test_a_ring_has_more_latency_than_a_tree_and_as_many_bytes() -> None:
    ring, tree = AllReduce.ring(16, 1e-3, 1e9), AllReduce.tree(16, 1e-3, 1e9)
    assert (ring.latency_s, tree.latency_s) == pytest.approx((30e-3, 8e-3))
    assert ring.seconds_per_byte == tree.seconds_per_byte == pytest.approx(1.875e-9)
    assert ring.sent_per_byte == pytest.approx(1.875)


def closed_form_s(result: Simulated, forward_s: list[float]) -> float:
    """Time at which the forward pass of the last recorded step ends.

    From the time at which the norm is known, N, the link has the rest of the gathers left, in the
    order of readers: N + max over i of (gathers left of layers 0 to i + forwards from i on).
    """
    before = result.slices()[-2]
    squares, *halves = before
    scatters, gathers = halves[: len(halves) // 2], halves[len(halves) // 2 :]
    norm_s = max(piece.finished_s for piece in scatters) + squares.size_bytes / 64
    assert squares.finished_s == pytest.approx(norm_s)
    left = [(g.finished_s - g.started_s) * (g.started_s >= norm_s) for g in gathers]
    ends = [sum(left[: i + 1]) + sum(forward_s[i:]) for i in range(len(forward_s))]
    return norm_s + max(ends)


def test_a_clipped_chain_in_halves_by_hand() -> None:
    # Three layers, one slice each: a half takes 1, 2 and 3 s, the squares' 32 bytes half a second.
    # s      0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16
    # device fa fb fc bc ... bb ... ba .......
    # link                sum c ... sum b .. parts c ... (sum a at 9, squares, parts a, parts b)
    sizes = [2 * 64, 4 * 64, 6 * 64]
    forward_s = [1.0, 1.0, 1.0]
    work = Workload.chain(["a", "b", "c"], forward_s, [7.0, 2.0, 2.0], [[size] for size in sizes])
    halves = Schedule(6 * 64, 6 * 64, split=True)
    one_lane = replace(LINK, lanes=1)
    result = simulate(work, one_lane, halves, ranks=1, steps=3, recorded=2, clipped=True)
    pieces = {piece.name: piece for piece in result.slices()[0]}
    assert list(pieces) == [
        "squares", "sum of a", "sum of b", "sum of c", "parts of a", "parts of b", "parts of c"
    ]  # fmt: skip
    begin_s = result.step_starts_s()[2]  # backward has ended
    after = {name: (p.started_s - begin_s, p.finished_s - begin_s) for name, p in pieces.items()}
    assert after["sum of c"] == pytest.approx((-9, -6))
    assert after["sum of b"] == pytest.approx((-6, -4)), "before the gather of c, ready as well"
    assert after["parts of b"] == pytest.approx((-4, -2)), "in the idle time before the norm"
    assert after["parts of c"] == pytest.approx((-2, 1)), "and cannot be interrupted"
    assert after["sum of a"] == pytest.approx((1, 2))
    assert after["squares"] == pytest.approx((2, 2.5))
    assert after["parts of a"] == pytest.approx((2.5, 3.5))
    assert result.step_s[-1] == pytest.approx(3.5 + 3 + 11)
    assert result.ops()[-1][2].end_s == pytest.approx(closed_form_s(result, forward_s))
    assert result.sent_bytes == pytest.approx(12 * 64 + 32)


def test_a_clipped_step_awaits_whole_sums_and_gains_from_halves() -> None:
    work = Workload.chain(["a", "b"], [1.0, 1.0], [2.0, 2.0], [[4 * 64], [4 * 64]])
    whole, halves = Schedule(4 * 64, 4 * 64), Schedule(4 * 64, 4 * 64, split=True)
    one_lane = replace(LINK, lanes=1)  # otherwise parts of a travel beside the squares
    clipped = [
        simulate(work, one_lane, each, ranks=1, steps=4, recorded=2, clipped=True)
        for each in (whole, halves)
    ]
    assert [each.steady_s for each in clipped] == pytest.approx([12, 11.25])
    assert clipped[1].ops()[-1][1].end_s == pytest.approx(closed_form_s(clipped[1], [1.0, 1.0]))
    awaited = replace(whole, cross_iteration=False)
    assert simulate(work, one_lane, awaited, ranks=1, steps=4).step_s == clipped[0].step_s
    # Awaited at the end of the step nothing is gained, and the squares are paid for.
    late = replace(halves, cross_iteration=False)
    assert simulate(work, one_lane, late, ranks=1, clipped=True).steady_s == pytest.approx(12.25)


def test_a_plan_is_followed() -> None:
    work = two_layers()
    for plan, first in ((range(7), "a[0]"), ([3, 4, 5, 6, 0, 1, 2], "b[0]")):
        schedule = Schedule(64, 64, "planned", "planned", plan=plan)
        result = simulate(work, LINK, schedule, steps=2, recorded=2)
        issued = sorted(result.slices()[0], key=lambda piece: piece.issued_s)
        assert issued[0].name == first


def test_a_straggler_is_a_device_of_its_own() -> None:
    result = simulate(two_layers(), LINK, ONE_AT_A_TIME, ranks=[1, 1, 1.5, 1])
    assert result.ranks() == [(1.0, 3), (1.5, 1)]
    assert result.steady_s > simulate(two_layers(), LINK, ONE_AT_A_TIME, ranks=4).steady_s
    late = result.step_starts_s(1)
    assert late[-1] > result.step_starts_s(0)[-1]


def test_servers_push_and_pull_at_the_same_time() -> None:
    work = Workload.chain(["a"], [1.0], [1.0], [[4 * 64]])
    servers = ParameterServers(2, worker_bytes_per_s=64, server_bytes_per_s=1e9)
    # Four slices, one after the other, and each is pulled while the next is pushed.
    result = simulate(work, servers, ONE_AT_A_TIME, steps=3)
    assert result.steady_s == pytest.approx(2 + 4 + 1, abs=1e-5)
    assert set(result.link_busy_s()) == {
        "worker 0 up", "worker 0 down", "server 0 up", "server 0 down", "server 1 up",
        "server 1 down",
    }  # fmt: skip
    assert result.link_busy_s()["worker 0 up"] == pytest.approx(4)


def test_the_order_of_pulls_matters_for_layers_in_sequence_only() -> None:
    # seq-32 and par-32 of Hashemi et al., "Execution Ordering", SysML 2018.
    count, size = 32, 64 * KIB
    layers = [str(i) for i in range(count)]
    sequence = Workload.chain(layers, [1.0] * count, [1.0] * count, [[size]] * count)
    every = range(count)
    parallel = Workload(
        [Op("all", float(count), reads=every), Op("back", float(count), [0], produces=every)],
        [Parameter(name, size) for name in layers],
    )

    def step_s(work: Workload, plan: list[int]) -> float:
        servers = ParameterServers(
            1, size, size, pull="next_step", pull_policy="planned", pull_plan=plan
        )
        return simulate(work, servers, Schedule(size, size), ranks=1, steps=3).steady_s

    forth, back = list(range(count)), list(range(count))[::-1]
    assert step_s(parallel, forth) == pytest.approx(step_s(parallel, back))
    assert step_s(sequence, forth) == pytest.approx(1 + 2 * count + 1)
    assert step_s(sequence, back) == pytest.approx(3 * count + 1)


def test_an_executor_may_pass_what_waits() -> None:
    ops = [
        Op("late", 1.0, reads=[0]),
        Op("early", 4.0),
        Op("both", 1.0, [0, 1], produces=[0]),
    ]
    work = Workload(ops, [Parameter("w", 4 * 64)])
    assert simulate(work, LINK, ONE_AT_A_TIME).steady_s == pytest.approx(10)
    assert simulate(work, LINK, ONE_AT_A_TIME, order="ready").steady_s == pytest.approx(6)


def test_a_standstill_names_op_and_slice() -> None:
    ops = [
        Op("first", 1.0, produces=[0]),
        Op("norm", 1.0, [0], awaits=[0]),
        Op("second", 1.0, [1], produces=[1]),
    ]
    work = Workload(ops, [Parameter("early", 16), Parameter("late", 16)])
    with pytest.raises(InvalidUsage, match=r"'norm' waits for 'early': slice 'early..late' lacks"):
        simulate(work, LINK, Schedule(KIB, KIB))


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        ([Op("a", -1.0, produces=[0])], "op 'a' takes -1"),
        ([Op("a", float("nan"), produces=[0])], "op 'a' takes nan"),
        ([Op("a", 1.0, [0], produces=[0])], "op 'a' needs its own result"),
        ([Op("a", 1.0, reads=[0])], "no op produces a gradient for parameter 'w'"),
        ([Op("a", 1.0, produces=[1])], "op 'a' produces gradient number 1; there are 1"),
    ],
)
def test_a_mistake_in_a_workload_is_named(ops: list[Op], message: str) -> None:
    with pytest.raises(InvalidUsage, match=message):
        Workload(ops, [Parameter("w", 64)])


def test_a_scenario_that_cannot_be_is_refused() -> None:
    with pytest.raises(InvalidUsage, match="credit"):
        simulate(two_layers(), LINK, Schedule(128, 64))
    with pytest.raises(InvalidUsage, match="planned"):
        simulate(two_layers(), LINK, Schedule(64, 64, "priority", "planned"))
    with pytest.raises(InvalidUsage, match="must list each"):
        simulate(two_layers(), LINK, Schedule(64, 64, "planned", "planned", plan=[0]))
    with pytest.raises(InvalidUsage, match="at least 1"):
        simulate(two_layers(), LINK, ONE_AT_A_TIME, steps=0)
    with pytest.raises(InvalidUsage, match="no ranks"):
        simulate(two_layers(), LINK, ONE_AT_A_TIME, ranks=0)
    with pytest.raises(InvalidUsage, match="parameter servers"):
        simulate(two_layers(), ParameterServers(0, 1, 1), ONE_AT_A_TIME)
    with pytest.raises(InvalidUsage, match="simulate it with clipping"):
        simulate(two_layers(), LINK, replace(ONE_AT_A_TIME, split=True))
    with pytest.raises(InvalidUsage, match="parameter servers update each slice by itself"):
        simulate(two_layers(), ParameterServers(1, 1, 1), ONE_AT_A_TIME, clipped=True)
    planned = Schedule(64, 128, "planned", "planned", plan=range(7), split=True)
    with pytest.raises(InvalidUsage, match=r"each of the 15 slices once; it lists 7"):
        simulate(two_layers(), LINK, planned, clipped=True)


def test_a_word_that_is_none_of_those_expected_is_refused() -> None:
    # A typing error must not silently simulate something else.
    with pytest.raises(InvalidUsage, match="order is 'programme'; expected one of program, ready"):
        simulate(two_layers(), LINK, ONE_AT_A_TIME, order="programme")  # type: ignore[arg-type]
    with pytest.raises(InvalidUsage, match="policy is 'fifo'; expected one of priority, arrival"):
        simulate(two_layers(), LINK, Schedule(64, 64, "fifo"))  # type: ignore[arg-type]
    servers = ParameterServers(1, 1, 1, pull="at once")  # type: ignore[arg-type]
    with pytest.raises(InvalidUsage, match="pull is 'at once'; expected one of at_once, next_step"):
        simulate(two_layers(), servers, ONE_AT_A_TIME)


def test_the_agreement_of_every_rank() -> None:
    # Seven ranks, two children each: a message takes 0.25 s and its sender 0.125 s.
    work = Workload.chain(["a"], [1.0], [1.0], [[64]])
    tree = Schedule(64, 64, control_latency_s=0.25, control_send_s=0.125, fan_out=2)
    result = simulate(work, LINK, tree, ranks=7, steps=4, every_agreement=True)
    assert result.step_s[-1] == pytest.approx(3 + 2 * (2 * 0.125 + 0.25))
    assert result.ranks() == [(1.0, 7)]
    first, inner, *_, last = result.agreement()
    assert (first.sent_messages, first.received_messages) == (2, 0)
    assert (inner.sent_messages, inner.received_messages) == (2, 1)
    assert (last.sent_messages, last.received_messages, last.received_slices) == (0, 1, 1)
    few = simulate(work, LINK, tree, ranks=7, steps=4)
    assert len(few.agreement()) == 2
    assert few.step_s[-1] == pytest.approx(3 + 0.125 + 0.25)
