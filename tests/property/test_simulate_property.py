"""Whatever the model and the network: what no step can do, and what must not make a difference."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
from helpers.property_cases import cases
from hypothesis import given
from hypothesis import strategies as st

from hvd_order.planning.bounds.bound import chain_optimum_s
from hvd_order.planning.bounds.clipped_bound import clipped_chain_optimum_s
from hvd_order.planning.predict.simulate import (
    AllReduceScenario,
    ScenarioOp,
    ScenarioParameter,
    Simulated,
    StepWorkload,
    TransferSchedule,
    ddp,
    simulate,
)

UNIT = 64
STEPS = 6
EPS = 1e-9

# Quarters of a second and whole units: sums are exact, and ties are frequent.
times = st.integers(0, 12).map(lambda quarters: quarters / 4)
sizes = st.integers(1, 24).map(lambda pieces: pieces * 16)


@dataclass(frozen=True)
class Chain:
    """Layers as lists, to compute bounds from."""

    forward_s: list[float]
    backward_s: list[float]
    size_bytes: list[int]

    def workload(self, update_s_per_byte: float = 0.0) -> StepWorkload:
        names = [f"l{i}" for i in range(len(self.size_bytes))]
        return StepWorkload.chain(
            names,
            self.forward_s,
            self.backward_s,
            [[size] for size in self.size_bytes],
            update_s_per_byte,
        )


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    count = draw(st.integers(1, 7))

    def row(values: st.SearchStrategy[float]) -> list[float]:
        return draw(st.lists(values, min_size=count, max_size=count))

    # A step that takes no time at all has no steady state worth the name.
    return Chain(
        row(times),
        [0.25 + s for s in row(times)],
        draw(st.lists(sizes, min_size=count, max_size=count)),
    )


@st.composite
def graphs(draw: st.DrawFn) -> StepWorkload:
    """Any graph on one or two streams; inputs come before their users, so that it can run."""
    count = draw(st.integers(1, 9))
    tensors = draw(st.integers(1, 5))
    numbers = st.lists(st.integers(0, tensors - 1), max_size=3)
    ops = []
    for i in range(count):
        inputs = draw(st.lists(st.integers(0, i - 1), max_size=3)) if i else []
        ops.append(
            ScenarioOp(
                f"op{i}",
                draw(times),
                inputs,
                draw(numbers),
                draw(numbers),
                stream=draw(st.integers(0, 1)),
            )
        )
    missing = sorted(set(range(tensors)) - {t for op in ops for t in op.produces})
    ops.append(ScenarioOp("last", 0.25, range(count), produces=missing))
    parameters = [
        ScenarioParameter(
            f"t{i}", draw(sizes), draw(st.sampled_from([0.0, 0.5])), draw(st.integers(0, 1))
        )
        for i in range(tensors)
    ]
    return StepWorkload(ops, parameters)


links = st.builds(
    AllReduceScenario,
    latency_s=st.sampled_from([0.0, 0.25, 2.0]),
    seconds_per_byte=st.sampled_from([0.0, 1 / UNIT, 4 / UNIT]),
    slice_cost_s=st.sampled_from([0.0, 0.125]),
    lanes=st.integers(0, 3),
)
schedules = st.builds(
    lambda slice_bytes, spare, policy, agreement, latency, lead, cross: TransferSchedule(
        slice_bytes,
        slice_bytes + spare,
        policy,
        agreement,
        cross,
        control_latency_s=latency,
        reservation_lead_s=lead,
    ),
    st.integers(UNIT, 300),
    st.integers(0, 600),
    st.sampled_from(["priority", "arrival"]),
    st.sampled_from(["leader", "negotiated"]),
    st.sampled_from([0.0, 0.25, 1.0]),
    st.sampled_from([0.0, 0.5, 3.0]),
    st.booleans(),
)
# Whether the program clips, and whether sums are split then.
forms = st.sampled_from([(False, False), (True, False), (True, True)])
speeds = st.lists(st.sampled_from([1.0, 1.5, 2.0]), min_size=1, max_size=5)


def play(
    work: StepWorkload,
    network: AllReduceScenario,
    schedule: TransferSchedule,
    form: tuple[bool, bool],
    **more: Any,
) -> Simulated:
    clipped, split = form
    return simulate(work, network, in_form(work, schedule, split), clipped=clipped, **more)


def in_form(work: StepWorkload, schedule: TransferSchedule, split: bool) -> TransferSchedule:
    """The schedule split, or not; the squares are one slice and have to fit the credit."""
    largest = work.layout(schedule.slice_bytes, split).largest_slice_bytes
    credit_bytes = max(schedule.credit_bytes, largest)
    return replace(schedule, credit_bytes=credit_bytes, split=split)


def times_of(result: Simulated) -> tuple[object, ...]:
    return result.step_s, result.end_s, result.sent_bytes


@cases(120)
@given(graphs(), links, schedules, forms, speeds, st.sampled_from(["program", "ready"]))
def test_no_resource_works_more_than_time_passes(
    work: StepWorkload, network: AllReduceScenario, schedule: TransferSchedule,
    form: tuple[bool, bool], ranks: list[float], order: str,
) -> None:  # fmt: skip
    result = play(
        work, network, schedule, form, ranks=ranks, steps=STEPS, recorded=STEPS, order=order
    )
    for device, _ in enumerate(result.ranks()):
        span = result.step_starts_s(device)[-1]
        assert all(busy * STEPS <= span + EPS for busy in result.compute_busy_s(device))
        for step in result.ops(device):
            for op in step:
                assert op.could_start_s <= op.start_s + EPS
                assert op.start_s <= op.end_s
    busy = result.link_busy()
    assert all(begin <= end for begin, end in busy)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(busy))
    assert sum(end - begin for begin, end in busy) == pytest.approx(
        result.link_busy_s() * STEPS, abs=1e-6
    )


@cases(100)
@given(graphs(), links, schedules, forms, speeds)
def test_ranks_that_do_the_same_need_not_be_simulated(
    work: StepWorkload, network: AllReduceScenario, schedule: TransferSchedule,
    form: tuple[bool, bool], ranks: list[float],
) -> None:  # fmt: skip
    few = play(work, network, schedule, form, ranks=ranks, steps=STEPS)
    everyone = play(work, network, schedule, form, ranks=ranks, steps=STEPS, every_rank=True)
    # Several equal flows share a link in one sum or in several, which may round differently.
    assert few.step_s == pytest.approx(everyone.step_s, abs=1e-6)
    assert few.sent_bytes == everyone.sent_bytes


@cases(60)
@given(
    graphs(), links, schedules, forms,
    st.lists(st.sampled_from([1.0, 1.5]), min_size=1, max_size=12),
    st.sampled_from([0.0, 0.125]), st.integers(1, 4),
)  # fmt: skip
def test_ranks_that_compute_the_same_agree_each_for_itself(
    work: StepWorkload, network: AllReduceScenario, schedule: TransferSchedule,
    form: tuple[bool, bool],
    ranks: list[float], send_s: float, fan_out: int,
) -> None:  # fmt: skip
    tree = replace(schedule, control_send_s=send_s, fan_out=fan_out)
    halves = play(work, network, tree, form, ranks=ranks, steps=STEPS, every_agreement=True)
    everyone = play(work, network, tree, form, ranks=ranks, steps=STEPS, every_rank=True)
    assert times_of(halves) == times_of(everyone)
    assert halves.agreement() == everyone.agreement()
    sent = sum(rank.sent_slices for rank in halves.agreement())
    assert sent == pytest.approx(sum(rank.received_slices for rank in halves.agreement()))


@cases(100)
@given(graphs(), links, schedules, forms, speeds)
def test_bytes_and_credit_are_kept(
    work: StepWorkload, link: AllReduceScenario, schedule: TransferSchedule,
    form: tuple[bool, bool],
    ranks: list[float],
) -> None:  # fmt: skip
    schedule = in_form(work, schedule, form[1])
    result = play(work, link, schedule, form, ranks=ranks, steps=STEPS, recorded=STEPS)
    layout = work.layout(schedule.slice_bytes, schedule.split)
    # Two halves move what one all-reduce does.
    assert result.sent_bytes == pytest.approx(sum(layout.buffer_bytes))
    pieces = [piece for step in result.slices() for piece in step]
    total = sum(piece.size_bytes for piece in layout.slices)
    assert sum(piece.size_bytes for piece in pieces) == total * STEPS
    for one in pieces:
        assert one.ready_s <= one.finished_s
        assert one.issued_s <= one.started_s <= one.finished_s
        in_flight = [o for o in pieces if o.issued_s <= one.issued_s < o.finished_s]
        counted = [o.size_bytes for o in in_flight if o.name != "squares"]  # they take no credit
        assert sum(counted) <= schedule.credit_bytes


@cases(100)
@given(chains(), schedules, st.sampled_from([1 / UNIT, 4 / UNIT]))
def test_never_faster_than_the_fluid_bound(
    chain: Chain, schedule: TransferSchedule, seconds_per_byte: float
) -> None:
    link = AllReduceScenario(0.0, seconds_per_byte)
    work = chain.workload()
    padded = [(size + 15) // 16 * 16 for size in chain.size_bytes]
    steps = 24
    result = simulate(work, link, schedule, steps=steps)
    wire_s = [size * seconds_per_byte for size in padded]
    assert result.steady_s >= chain_optimum_s(chain.forward_s, chain.backward_s, wire_s) - EPS


@cases(100)
@given(chains(), st.sampled_from([1 / UNIT, 4 / UNIT]))
def test_priority_is_never_slower_than_waiting_for_all(
    chain: Chain, seconds_per_byte: float
) -> None:
    # With slices that nothing delays (no latency, credit for one, no agreement on the way) the next
    # step starts no later than it would behind the end of all transfers, and every layer by itself.
    link = AllReduceScenario(0.0, seconds_per_byte, lanes=1)
    together = TransferSchedule(UNIT, UNIT, cross_iteration=False)
    work = chain.workload()
    all_waiting = simulate(work, link, together, ranks=1, steps=STEPS)
    ordered = simulate(work, link, replace(together, cross_iteration=True), ranks=1, steps=STEPS)
    for early, late in zip(ordered.step_starts_s(), all_waiting.step_starts_s(), strict=True):
        assert early <= late + EPS
    assert ordered.end_s <= all_waiting.end_s + EPS


@cases(100)
@given(chains(), schedules, st.sampled_from([1 / UNIT, 4 / UNIT]))
def test_no_split_step_is_faster_than_the_clipped_bound(
    chain: Chain, schedule: TransferSchedule, seconds_per_byte: float
) -> None:
    work = chain.workload()
    halves = in_form(work, schedule, True)
    result = simulate(
        work, AllReduceScenario(0.0, seconds_per_byte), halves, steps=STEPS, clipped=True
    )
    wire_s = [(size + 15) // 16 * 16 * seconds_per_byte for size in chain.size_bytes]
    bound_s = clipped_chain_optimum_s(chain.forward_s, chain.backward_s, wire_s)
    assert min(result.step_s[1:]) >= bound_s - EPS


@cases(100)
@given(chains(), st.sampled_from([1 / UNIT, 4 / UNIT]), st.integers(1, 6))
def test_halves_are_slower_than_whole_sums_by_the_squares_at_most(
    chain: Chain, seconds_per_byte: float, units: int
) -> None:
    # The link never idles beside work, so all but the squares has arrived when whole sums have.
    link = AllReduceScenario(0.0, seconds_per_byte)
    work = chain.workload(0.25 / UNIT)
    schedule = in_form(work, TransferSchedule(units * UNIT, units * UNIT), True)
    whole, halves = (
        simulate(work, link, replace(schedule, split=split), ranks=1, steps=STEPS, clipped=True)
        for split in (False, True)
    )
    squares_s = work.layout(units * UNIT, True).buffer_bytes[-1] * seconds_per_byte
    assert max(halves.step_s[1:]) <= max(whole.step_s) + squares_s + EPS


@cases(60)
@given(chains(), st.sampled_from([1.0, 4.0]))
def test_fine_slices_in_halves_come_to_the_clipped_bound(chain: Chain, pace: float) -> None:
    # Slices of a 64th: one in flight delays all others by a half of it, and the squares wait too.
    fine = 64
    sizes = [fine * size for size in chain.size_bytes]
    work = replace(chain, size_bytes=sizes).workload()
    layout = work.layout(8 * UNIT, True)
    seconds_per_byte = pace / UNIT / fine
    schedule = TransferSchedule(8 * UNIT, layout.largest_slice_bytes, split=True)
    link = AllReduceScenario(0.0, seconds_per_byte, lanes=1)
    result = simulate(work, link, schedule, ranks=1, steps=STEPS, clipped=True)
    bound_s = clipped_chain_optimum_s(
        chain.forward_s, chain.backward_s, [size * seconds_per_byte for size in sizes]
    )
    delay_s = (layout.buffer_bytes[-1] + 2 * schedule.credit_bytes) * seconds_per_byte
    assert bound_s - EPS <= result.steady_s <= bound_s + delay_s + EPS


@cases(100)
@given(chains(), st.integers(1, 6), st.integers(1, 6), st.sampled_from([0.0, 0.25]))
def test_ddp_follows_its_formula(chain: Chain, first: int, units: int, latency_s: float) -> None:
    # c(k) = max(c(k-1), ready(k)) + latency + bytes(k) * beta: MG-WFBP, arXiv 1912.09268.
    work, schedule = ddp(chain.workload(), units * UNIT, first * UNIT)
    link = AllReduceScenario(latency_s, 1 / UNIT, lanes=1)
    now, free, filled, limit = sum(chain.forward_s), 0.0, 0, first * UNIT
    for i in reversed(range(len(chain.size_bytes))):
        now += chain.backward_s[i]
        filled += chain.size_bytes[i]
        if filled >= limit or i == 0:
            free = max(free, now) + latency_s + filled / UNIT
            filled, limit = 0, units * UNIT
    result = simulate(work, link, schedule, steps=3)
    assert result.step_s == pytest.approx([max(now, free)] * 3)
