"""Plans survive their file, say what keeps them from fitting, and refuse nonsense by its place."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.property_cases import cases
from hypothesis import given
from hypothesis import strategies as st

from hvd_order.base.errors import InvalidUsage
from hvd_order.base.link.link_model import LinkModel
from hvd_order.base.link.slice_settings import SliceSettings
from hvd_order.base.plan.plan_file import Confirmed, Plan, PlanCandidate, read_plan
from hvd_order.planning.graph.graph import GraphParameter

ROOT = Path(__file__).parents[3]


def example() -> Plan:
    return Plan(
        model="tiny",
        ranks=4,
        link=LinkModel(5e-4, 3e-4, 8.7e-9),
        order="due_date",
        parameters=(GraphParameter("fc.weight", 4096), GraphParameter("fc.bias", 64)),
        candidates=(
            # A number that needs all its digits.
            PlanCandidate(SliceSettings(2048, 4096, agreement="planned"), 0.1 + 0.2),
            PlanCandidate(SliceSettings(2**20, 2**22, "arrival", "planned"), 0.5),
        ),
        bound_s=0.25,
        idle=(GraphParameter("pooler.weight", 512),),
        issue_order=("fc.weight[1]", "fc.bias", "fc.weight[0]"),
        confirmed=Confirmed(SliceSettings(2048, 4096, cross_iteration=False), 0.31, 4),
    )


sizes = st.integers(64, 2**30)
seconds = st.floats(1e-9, 1e6)
agreements = st.sampled_from(["leader", "negotiated", "planned"])
choices = st.builds(
    lambda size, more, policy, agreement, cross, split: SliceSettings(
        size, size + more, policy, agreement, cross, split=split
    ),
    sizes, st.integers(0, 2**30), st.sampled_from(["priority", "arrival"]), agreements,
    st.booleans(), st.booleans(),
)  # fmt: skip


@st.composite
def candidate_lists(draw: st.DrawFn) -> tuple[PlanCandidate, ...]:
    """Candidates of a plan: one agreement, and all overlap with the next step."""
    agreement = draw(agreements)
    return tuple(
        PlanCandidate(replace(each, agreement=agreement, cross_iteration=True), draw(seconds))
        for each in draw(st.lists(choices, min_size=1, max_size=4))
    )


parameters = st.lists(
    st.builds(GraphParameter, st.text(min_size=1), st.integers(0, 2**40)),
    max_size=6, unique_by=lambda parameter: parameter.name,
)  # fmt: skip


def coded_of(known: tuple[GraphParameter, ...]) -> st.SearchStrategy[tuple[str, ...] | None]:
    """What trials may have chosen to travel in codes: some gradients, none, or no choice."""
    names = st.sampled_from([p.name for p in known]) if known else st.nothing()
    return st.none() | st.lists(names, unique=True).map(tuple)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    both = tuple(draw(parameters))
    travelling = draw(st.integers(0, len(both)))
    rates = st.floats(0, 1)
    ranks = st.integers(1, 10**6)
    return Plan(
        draw(st.text()),
        draw(ranks),
        LinkModel(draw(rates), draw(rates), draw(rates)),
        draw(st.text()),
        both[:travelling],
        draw(candidate_lists()),
        draw(st.floats(0, 1e6)),
        both[travelling:],
        draw(st.none() | st.lists(st.text(), unique=True).map(tuple)),
        draw(st.none() | st.builds(Confirmed, choices, seconds, ranks, coded_of(both))),
    )


@cases(40)
@given(plan=plans())
def test_a_plan_survives_its_file(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    plan.write(path)
    assert read_plan(path) == plan
    assert list(path.parent.iterdir()) == [path]


def changed(content: dict[str, Any], path: list[Any], value: Any) -> dict[str, Any]:
    at: Any = content
    for key in path[:-1]:
        at = at[key]
    if value is None and isinstance(at, dict):
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return content


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["format"], "hvd_order profile", 'no plan: it does not say "format": "hvd_order plan"'),
        (["version"], 7, "version 7 of the format, this hvd_order reads 1; make the plan again"),
        (["surprise"], 1, 'the plan has unknown fields: "surprise"'),
        (["cluster", "hosts"], 2, '"cluster" has unknown fields: "hosts"'),
        (["cluster", "ranks"], 0, '"cluster" has "ranks": 0; expected 1 or more'),
        (["cluster", "latency_s"], -1.0, '"cluster" has "latency_s": -1.0'),
        (["agreement"], "votes", "expected one of leader, negotiated, planned"),
        (["candidates"], [], '"candidates" is empty'),
        (["candidates", 1, "slice_bytes"], 2**23, "candidate 1 has slices of 8388608 bytes"),
        (["candidates", 1, "slice_bytes"], 1, "candidate 1 has slices of 1 bytes"),
        (["candidates", 0, "predicted_s"], 0.0, 'candidate 0 has "predicted_s": 0.0'),
        (["candidates", 0, "policy"], "random", "expected one of priority, arrival"),
        (["candidates", 0, "split"], "yes", "candidate 0 has \"split\": 'yes'; expected true or"),
        (["candidates", 0, "colour"], "red", 'candidate 0 has unknown fields: "colour"'),
        (["parameters", 1, "name"], "fc.weight", "the parameter 'fc.weight' is listed 2 times"),
        (["idle", 0, "name"], "fc.weight", "the parameter 'fc.weight' is listed 2 times"),
        (["idle", 0, "size_bytes"], "big", "parameter 0 of \"idle\" ('pooler.weight') has"),
        (["confirmed", "step_s"], None, '"confirmed" lacks "step_s"'),
        (["confirmed", "ranks"], -1, '"confirmed" has "ranks": -1'),
        (["confirmed", "coded"], [7], '"confirmed" has "coded": [7]; expected names'),
        (["confirmed", "coded"], ["gone"], '"confirmed" has \'gone\' in "coded"; the plan lacks'),
        (["issue_order", 0], "fc.bias", "\"issue_order\" has 'fc.bias' more than once"),
        (["issue_order"], [3], 'the plan has "issue_order": [3]; expected names'),
    ],
)
def test_mistakes_in_a_file_are_named(
    tmp_path: Path, path: list[Any], value: Any, message: str
) -> None:
    file = tmp_path / "broken.json"
    example().write(file)
    file.write_text(json.dumps(changed(json.loads(file.read_text()), path, value)))
    with pytest.raises(InvalidUsage) as raised:
        read_plan(file)
    assert message in str(raised.value)
    assert str(file) in str(raised.value)


def test_only_candidates_in_halves_say_so(tmp_path: Path) -> None:
    # So a plan for whole sums is the file that it was before there was a choice.
    first, second = example().candidates
    halves = replace(second, slice_settings=replace(second.slice_settings, split=True))
    file = tmp_path / "plan.json"
    replace(example(), candidates=(first, halves)).write(file)
    written = json.loads(file.read_text())["candidates"]
    assert ["split" in each for each in written] == [False, True]
    read = read_plan(file).candidates
    assert [each.slice_settings.split for each in read] == [False, True]


def test_what_keeps_a_plan_from_fitting() -> None:
    plan = example()
    fits = {"fc.bias": 64, "fc.weight": 4096}
    assert plan.differences(fits) == []
    assert plan.differences({**fits, "pooler.weight": 512}) == []  # had no gradient, may have one
    assert plan.differences({**fits, "fc.bias": 128}) == ["'fc.bias' has 128 bytes, in the plan 64"]
    assert plan.differences({"fc.bias": 64}) == [
        "the model lacks 'fc.weight', or does not train it"
    ]
    others = {f"layer{i}": 4 for i in range(5)}
    assert plan.differences({**fits, **others}) == [
        "the plan lacks 'layer0', 'layer1', 'layer2' and 2 more"
    ]


def test_what_trials_have_chosen_comes_first() -> None:
    plan = example()
    other = Confirmed(SliceSettings(2**20, 2**22, "arrival"), 0.2, 4)
    assert plan.slice_settings == SliceSettings(2048, 4096, cross_iteration=False)
    assert plan.issue_order_of(plan.candidates[0].slice_settings) == plan.issue_order
    assert replace(plan, confirmed=other).slice_settings == other.slice_settings
    assert plan.issue_order_of(other.slice_settings) is None
    names = ["pooler.weight", "fc.bias", "fc.weight"]
    assert plan.in_order(names) == ["fc.weight", "fc.bias", "pooler.weight"]


def test_the_example_in_the_document_is_a_plan(tmp_path: Path) -> None:
    document = (ROOT / "docs/guides/planning.md").read_text("utf-8")
    file = tmp_path / "example.json"
    file.write_text(document.split("## Plan file")[1].split("```json\n")[1].split("```")[0])
    assert read_plan(file).model == "resnet50"
