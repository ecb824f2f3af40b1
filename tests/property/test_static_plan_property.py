"""Orders for planned agreement, of whole and of split layouts: every rank can follow them."""

from __future__ import annotations

from typing import get_args

import torch  # noqa: F401  # _torch needs its libraries
from helpers.oracles.agreement_world import Workload, World
from helpers.oracles.split_layouts import can_be_followed
from helpers.property_cases import Choices, cases, choices, slice_sizes, tensor_specs
from hypothesis import given
from hypothesis import strategies as st

from hvd_order._native import _torch as native
from hvd_order._native._core import AgreementKind, Policy
from hvd_order.base.link.link_model import LinkModel
from hvd_order.base.link.slice_settings import PolicyName, SliceSettings
from hvd_order.engine import static_plan

MOST_TENSORS = 5


def run(work: Workload, chance: Choices, plan: list[int]) -> None:
    """All ranks follow the plan in a random schedule, to the end."""
    World(AgreementKind.PLANNED, Policy.PLANNED, work, chance, plan).run()


workloads = st.builds(
    Workload,
    models=st.fixed_dictionaries({0: tensor_specs(MOST_TENSORS)}),
    slice_bytes=slice_sizes,
    spare_credit=st.integers(0, 500),
    size=st.integers(1, 3),
    steps=st.just(2),
    whole_steps=st.booleans(),
    late=st.booleans(),
    split=st.sampled_from([frozenset(), frozenset({0})]),
)


def layout_of(work: Workload) -> native.SliceLayout:
    return native.SliceLayout(work.models[0], work.slice_bytes, split=0 in work.split)


@cases(1200, quick=300)
@given(
    work=workloads,
    times=st.lists(st.integers(0, 20), min_size=MOST_TENSORS, max_size=MOST_TENSORS),
    policy=st.sampled_from([name for name in get_args(PolicyName) if name != "planned"]),
    link=st.builds(
        LinkModel,
        latency_s=st.just(0.0),
        slice_cost_s=st.sampled_from([0.0, 1.0]),
        seconds_per_byte=st.sampled_from([1e-3, 1e-2, 1.0]),
    ),
    chance=choices(),
)
def test_a_replayed_step_is_a_plan_that_all_ranks_can_follow(
    work: Workload, times: list[int], policy: PolicyName, link: LinkModel, chance: Choices
) -> None:
    layout = layout_of(work)
    credit = layout.largest_slice_bytes + work.spare_credit
    ready_s = [float(at) for at in times[: len(work.models[0])]]
    plan = static_plan.replay(
        layout, ready_s, link, SliceSettings(work.slice_bytes, credit, policy)
    )
    assert can_be_followed(layout, plan)
    assert static_plan.by_name(layout, [layout.slice_name(s) for s in plan]) == plan
    run(work, chance, plan)


@cases(400, quick=100)
@given(work=workloads, chance=choices())
def test_all_ranks_can_follow_the_plan_before_any_measurement(
    work: Workload, chance: Choices
) -> None:
    layout = layout_of(work)
    plan = static_plan.arrival_plan(layout)
    assert can_be_followed(layout, plan)
    count = len(layout.slices)
    if layout.is_split:
        sums = range(1, 1 + count // 2)
        assert plan == [*reversed(sums), 0, *range(1 + count // 2, count)]
    else:
        assert plan == list(range(count))[::-1]
    run(work, chance, plan)


def test_what_the_norms_wait_for_goes_first() -> None:
    # Three slices, ready at once: the link carries one at a time.
    layout = native.SliceLayout([(f"t{i}", 64, 0) for i in range(3)], 64, split=True)
    settings = SliceSettings(64, 64, "priority")
    plan = static_plan.replay(layout, [0.0] * 3, LinkModel(0.0, 0.0, 1.0), settings)
    assert plan == [1, 2, 3, 0, 4, 5, 6]


def test_halves_by_need_go_in_pairs() -> None:
    # Nobody waits for norms: the first tensor is whole after a third of the bytes.
    layout = native.SliceLayout([(f"t{i}", 64, 0) for i in range(3)], 64, split=True, by_need=True)
    settings = SliceSettings(64, 64, "priority")
    plan = static_plan.replay(layout, [0.0] * 3, LinkModel(0.0, 0.0, 1.0), settings)
    assert plan == [1, 4, 2, 5, 3, 0, 6]


def test_a_half_moves_half_of_the_bytes() -> None:
    # 64 bytes a second: a half of the last tensor takes half a second, so the second half of it has
    # begun when the others are ready.
    layout = native.SliceLayout([(f"t{i}", 64, 0) for i in range(3)], 64, split=True)
    settings = SliceSettings(64, 64, "priority")
    plan = static_plan.replay(layout, [0.6, 0.6, 0.0], LinkModel(0.0, 0.0, 1 / 64), settings)
    assert plan == [3, 6, 1, 2, 0, 4, 5]
    late = static_plan.replay(layout, [0.4, 0.4, 0.0], LinkModel(0.0, 0.0, 1 / 64), settings)
    assert late == [3, 1, 2, 0, 4, 5, 6]
