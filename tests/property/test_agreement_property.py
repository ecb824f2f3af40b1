"""Whatever the timing on each rank: one order, nothing lost, nothing twice, no deadlock.

What is checked stands in ``helpers.oracles.agreement_world``. Together with the other files of this
folder these are more than 10,000 random schedules in `make test-long`, and a quarter of them in
`make test`; see ``helpers.property_cases`` on how to try others. The model checker (tests/
model_checker) tries every schedule of small jobs.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.oracles.agreement_world import Workload, World
from helpers.property_cases import Choices, cases, choices, slice_sizes, tensor_specs
from hypothesis import event, given
from hypothesis import strategies as st

from hvd_order._native._core import AgreementKind, Policy

ANY_ORDER = [
    (AgreementKind.LEADER, Policy.PRIORITY),
    (AgreementKind.LEADER, Policy.ARRIVAL),
    (AgreementKind.NEGOTIATED, Policy.PRIORITY),
    (AgreementKind.NEGOTIATED, Policy.ARRIVAL),
]
NAMES = ["leader-priority", "leader-arrival", "negotiated-priority", "negotiated-arrival"]


def workloads(model_ids: tuple[int, ...]) -> st.SearchStrategy[Workload]:
    return st.builds(
        Workload,
        models=st.fixed_dictionaries({m: tensor_specs() for m in model_ids}),
        slice_bytes=slice_sizes,
        spare_credit=st.integers(0, 500),
        size=st.integers(1, 4),
        steps=st.integers(1, 3),
        whole_steps=st.booleans(),
        late=st.booleans(),
        split=st.frozensets(st.sampled_from(model_ids)),
    )


@pytest.mark.parametrize(("kind", "policy"), ANY_ORDER, ids=NAMES)
@cases(1200, quick=300)
@given(work=workloads((0,)), chance=choices())
def test_all_ranks_issue_one_order(
    kind: AgreementKind, policy: Policy, work: Workload, chance: Choices
) -> None:
    World(kind, policy, work, chance).run()


@pytest.mark.parametrize(("kind", "policy"), ANY_ORDER, ids=NAMES)
@cases(500, quick=125)
@given(work=workloads((0, 3)), chance=choices())
def test_two_models_share_one_order(
    kind: AgreementKind, policy: Policy, work: Workload, chance: Choices
) -> None:
    World(kind, policy, work, chance).run()


@pytest.mark.parametrize("policy", [Policy.PRIORITY, Policy.ARRIVAL])
@cases(1200, quick=300)
@given(
    tensors=st.integers(8, 14),
    size=st.integers(2, 3),
    whole_steps=st.booleans(),
    split=st.frozensets(st.just(0)),
    chance=choices(),
)
def test_ranks_that_hold_up_the_others_are_heard(
    policy: Policy,
    tensors: int,
    size: int,
    whole_steps: bool,
    split: frozenset[int],
    chance: Choices,
) -> None:
    # Equal tensors of a slice each, of which one fits the credit: much to hold up, and no time.
    specs = [(f"t{i}", 64, 0) for i in range(tensors)]
    work = Workload({0: specs}, 64, 0, size, 3, whole_steps, late=False, split=split)
    world = World(AgreementKind.LEADER, policy, work, chance)
    world.run()
    event(f"ranks heard: {len(world.ever_heard)}")


TREES = st.one_of(
    st.tuples(st.integers(2, 5), st.just(1)),  # a chain
    st.tuples(st.integers(4, 14), st.just(2)),
    st.tuples(st.integers(5, 20), st.sampled_from([3, 4])),
)  # how many ranks, fan-out


@pytest.mark.parametrize(("kind", "policy"), ANY_ORDER, ids=NAMES)
@cases(150, quick=75)
@given(
    tree=TREES,
    work=workloads((0, 3)),
    chance=choices(),
)
def test_a_tree_of_ranks_issues_one_order(
    kind: AgreementKind, policy: Policy, tree: tuple[int, int], work: Workload, chance: Choices
) -> None:
    size, fan_out = tree
    World(kind, policy, replace(work, size=size, fan_out=fan_out), chance).run()


@pytest.mark.parametrize("policy", [Policy.PRIORITY, Policy.ARRIVAL])
@cases(300, quick=75)
@given(tree=TREES, tensors=st.integers(8, 14), whole_steps=st.booleans(), chance=choices())
def test_requests_to_be_heard_climb_the_tree(
    policy: Policy, tree: tuple[int, int], tensors: int, whole_steps: bool, chance: Choices
) -> None:
    specs = [(f"t{i}", 64, 0) for i in range(tensors)]
    size, fan_out = tree
    work = Workload({0: specs}, 64, 0, size, 3, whole_steps, late=False, fan_out=fan_out)
    world = World(AgreementKind.LEADER, policy, work, chance)
    world.run()
    event(f"ranks heard: {len(world.ever_heard)}")


@cases(1500, quick=375)
@given(work=workloads((0,)), chance=choices())
def test_all_ranks_follow_the_plan(work: Workload, chance: Choices) -> None:
    World(AgreementKind.PLANNED, Policy.PLANNED, work, chance).run()
