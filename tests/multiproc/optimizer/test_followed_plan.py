"""Runs follow a plan file, confirm it, start from what was confirmed, and notice when it ages."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.jobs import new_job, refused
from helpers.logged import logged
from helpers.ranks import RankPool
from torch import nn

import hvd_order.torch as hvd
from hvd_order._native._core import SliceLayout
from hvd_order.base.link import drift_detector
from hvd_order.base.link.link_model import LinkModel
from hvd_order.base.link.slice_settings import AgreementName, SliceSettings
from hvd_order.base.plan.plan_file import Confirmed, Plan, PlanCandidate, read_plan
from hvd_order.engine import link_probe
from hvd_order.engine.engine_host import engine_host
from hvd_order.planning.graph.graph import GraphParameter
from hvd_order.planning.predict.network import Network
from hvd_order.planning.predict.tune import tune
from hvd_order.planning.profiling.profiler import record_profile

KIB = 2**10
LINK = LinkModel(2e-4, 1e-4, 1e-9)
LINK_LATER = LinkModel(2e-4, 1e-4, 1e-7)  # slower, so slices should be smaller
MOST = 2000  # steps, more than all trials take
SHORT = 8  # steps: two to learn, one to change the settings, some to look at


class Network4(nn.Module):
    """Four layers; any of them can be told to sleep."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
        self.sleep_s = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            if i == 2 and self.sleep_s:
                time.sleep(self.sleep_s)
            x = layer(x).relu()
        return x


def parameters() -> tuple[GraphParameter, ...]:
    return tuple(GraphParameter(n, p.nbytes) for n, p in Network4().named_parameters())


def plan_of(settings: SliceSettings, *rivals: SliceSettings, **more: Any) -> Plan:
    agreement: AgreementName = more.pop("agreement", "leader")
    candidates = tuple(
        PlanCandidate(replace(each, agreement=agreement), 0.01 * (i + 1))
        for i, each in enumerate((settings, *rivals))
    )
    order = more.pop("parameters", parameters())
    return Plan("four layers", 2, LINK, "by hand", order, candidates, 0.005, **more)


Run = tuple[list[Any], list[str], str]


def train(
    env: dict[str, str],
    sleeps: Iterable[float],
    trace: str | None,
    traced_from: int,
    clips: bool = False,
) -> Run:
    """Takes a step for each of ``sleeps``, in which the third layer sleeps so long.

    Args:
        trace: file for a timeline that begins with step ``traced_from``.
        clips: whether gradients are clipped by their global norm.

    Returns:
        Each step's slice settings, what was logged, and the agreement.
    """
    # What is tried depends on it, and a busy machine measures anything.
    links = iter([LINK])
    choices = []
    with pytest.MonkeyPatch.context() as patch, logged() as lines, new_job(env):
        patch.setattr(link_probe, "measure", lambda *_: next(links, LINK_LATER))
        model = Network4()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1e-3), model.named_parameters()
        )
        host = engine_host()
        for step, model.sleep_s in enumerate(sleeps):
            if trace is not None and step == traced_from:
                optimizer.flush()
                hvd.start_timeline(trace)
            optimizer.zero_grad()
            x = torch.randn(4, 256, generator=torch.Generator().manual_seed(step + 7 * hvd.rank()))
            model(x).square().mean().backward()
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            choices.append(host.slice_settings)
        optimizer.flush()
        hvd.stop_timeline()
    return choices, lines, host.agreement


def body_train(
    env: dict[str, str], steps: int, trace: str | None = None, clips: bool = False
) -> Run:
    """As many steps, with a timeline of the last three."""
    return train(env, [0.0] * steps, trace, steps - 3, clips)


def until_tuned() -> Iterator[float]:
    """Steps without sleep until trials are over, and a few more."""
    after_tuning = 0
    for _ in range(MOST):
        yield 0.0
        after_tuning += engine_host().tuning_ended
        if after_tuning > SHORT:
            return


def body_settle(env: dict[str, str]) -> Run:
    return train(env, until_tuned(), None, 0)


def sent(trace: Path, rank: int) -> list[str]:
    """Names of slices in the order in which a rank issued them."""
    text = trace.with_name(trace.name.replace("{rank}", str(rank))).read_text()
    spans = [event for event in json.loads(text)["traceEvents"] if event.get("cat") == "transfer"]
    return [event["name"] for event in sorted(spans, key=lambda event: event["ts"])]


def slice_names(
    order: tuple[GraphParameter, ...], slice_bytes: int, split: bool = False
) -> list[str]:
    """Of the engine's layout: a gradient's place ends with its use flag and is aligned."""
    tensors = [(p.name, (p.size_bytes // 64 + 1) * 64, 0) for p in order]
    layout = SliceLayout(tensors, slice_bytes, split=split)
    return [layout.slice_name(i) for i in range(len(layout.slices))]


def test_planned_agreement_sends_exactly_what_the_plan_lists(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    order = parameters()[::-1]  # not what the forward pass would suggest
    names = slice_names(order, 64 * KIB)
    issue_order = (*names[1::2], *names[::2])  # nor what any policy would
    file, trace = tmp_path / "plan.json", tmp_path / "trace{rank}.json"
    settings = SliceSettings(64 * KIB, 128 * KIB, agreement="planned")
    plan_of(
        settings, agreement="planned", parameters=order, issue_order=issue_order,
        confirmed=Confirmed(settings, 0.01, 2),
    ).write(file)  # fmt: skip
    results = two_ranks.run(body_train, {"HVD_ORDER_PLAN": str(file)}, SHORT, str(trace))
    for rank, (choices, _, agreement) in enumerate(results):
        assert agreement == "planned"
        assert choices[-1] == settings
        assert sent(trace, rank) == 3 * list(issue_order)


def test_planned_agreement_sends_halves_as_the_plan_lists_them(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    squares, *halves = slice_names(parameters(), 64 * KIB, split=True)
    scatters, gathers = halves[: len(halves) // 2], halves[len(halves) // 2 :]
    issue_order = (*scatters[::-1], gathers[-1], squares, *gathers[:-1])
    file, trace = tmp_path / "plan.json", tmp_path / "trace{rank}.json"
    settings = SliceSettings(64 * KIB, 128 * KIB, agreement="planned", split=True)
    plan_of(settings, agreement="planned", issue_order=issue_order).write(file)
    env = {"HVD_ORDER_PLAN": str(file), "HVD_ORDER_TUNE": "0"}
    results = two_ranks.run(body_train, env, SHORT, str(trace), True)
    for rank, (choices, _, agreement) in enumerate(results):
        assert agreement == "planned"
        assert choices[-1] == settings
        assert sent(trace, rank) == 3 * list(issue_order)


@pytest.mark.parametrize(
    ("clips", "env", "split"),
    [(True, {}, True), (False, {}, False), (True, {"HVD_ORDER_SPLIT": "never"}, False)],
    ids=["clips", "does not clip", "never"],
)
def test_a_split_plan_is_followed_where_the_model_may_be_split(
    two_ranks: RankPool, tmp_path: Path, clips: bool, env: dict[str, str], split: bool
) -> None:
    file = tmp_path / "plan.json"
    settings = SliceSettings(64 * KIB, 128 * KIB, split=True)
    plan_of(settings, confirmed=Confirmed(settings, 0.01, 2)).write(file)
    results = two_ranks.run(body_train, {"HVD_ORDER_PLAN": str(file), **env}, SHORT, None, clips)
    for choices, lines, _ in results:
        assert choices[-1] == replace(settings, split=split)
        assert [line.count("all-reduces split") for line in lines[:1]] in ([], [split])


def test_priorities_are_the_plans_and_variables_that_are_set_win(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    order = parameters()[::-1]
    file, trace = tmp_path / "plan.json", tmp_path / "trace{rank}.json"
    plan_of(SliceSettings(64 * KIB, 256 * KIB), agreement="planned", parameters=order).write(file)
    env = {
        "HVD_ORDER_PLAN": str(file),
        "HVD_ORDER_AGREEMENT": "leader",
        "HVD_ORDER_SLICE_BYTES": "128KiB",
        "HVD_ORDER_CREDIT_BYTES": "128KiB",
    }
    results = two_ranks.run(body_train, env, SHORT, str(trace))
    for rank, (choices, _, agreement) in enumerate(results):
        assert (choices[-1], agreement) == (SliceSettings(128 * KIB, 128 * KIB), "leader")
        events = json.loads((tmp_path / f"trace{rank}.json").read_text())["traceEvents"]
        priority = {e["args"]["priority"]: e["name"] for e in events if e.get("cat") == "transfer"}
        assert [priority[i] for i in sorted(priority)] == slice_names(order, 128 * KIB)


def other_size(plan: Plan) -> Plan:
    first, *rest = plan.parameters
    return replace(plan, parameters=(replace(first, size_bytes=12), *rest))


def other_slices(plan: Plan) -> Plan:
    return replace(
        plan,
        candidates=tuple(
            replace(each, slice_settings=replace(each.slice_settings, agreement="planned"))
            for each in plan.candidates
        ),
        issue_order=("a", "b"),
    )


def test_a_plan_of_another_model_is_named_and_left_alone(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    other_size(plan_of(SliceSettings(64 * KIB, 128 * KIB))).write(file)
    before = file.read_text()
    env = {"HVD_ORDER_PLAN": str(file), "HVD_ORDER_TUNE": "0"}
    (choices, lines, _), (other_settings, other_lines, _) = two_ranks.run(body_train, env, SHORT)
    assert "'layers.0.weight' has 262144 bytes, in the plan 12" in lines[0]
    assert str(file) in lines[0]
    assert other_lines == []
    assert choices == other_settings
    assert choices[-1] != SliceSettings(64 * KIB, 128 * KIB)
    assert file.read_text() == before


def test_an_order_of_other_slices_is_replaced(two_ranks: RankPool, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    other_slices(plan_of(SliceSettings(64 * KIB, 128 * KIB))).write(file)
    env = {"HVD_ORDER_PLAN": str(file), "HVD_ORDER_TUNE": "0"}
    (choices, lines, agreement), _ = two_ranks.run(body_train, env, SHORT)
    assert agreement == "planned"
    assert choices[-1] == SliceSettings(64 * KIB, 128 * KIB, agreement="planned")
    assert "the plan orders 2 slices" in lines[0]


def body_refused(file: str) -> str:
    text = refused(lambda: body_train({"HVD_ORDER_PLAN": file}, SHORT))
    hvd.shutdown()
    return text


def test_a_file_that_is_no_plan_ends_the_run_on_every_rank(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    file.write_text("{}")
    texts = two_ranks.run(body_refused, str(file))
    assert texts[0] == texts[1]
    assert texts[0].startswith("HVD_ORDER_PLAN: ")
    assert 'no plan: it does not say "format": "hvd_order plan"' in texts[0]
    assert str(file) in texts[0]


def body_profile(steps: int) -> Any:
    """What ``hvd-order profile`` records, of one process."""
    model = Network4()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 256)).square().mean().backward()
        optimizer.step()

    return record_profile(step, model.named_parameters(), "four layers", runs=steps).graph("median")


@pytest.mark.timeout(240)
def test_a_tuned_plan_is_tried_confirmed_and_then_taken(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    graph = two_ranks.run(body_profile, 5)[0]
    file = tmp_path / "plan.json"
    plan = tune(graph, Network.of_ring(2, 2e9, 1e-4), "four layers").plan
    first = plan.candidates[0].slice_settings  # it depends on what the profile has measured
    rival = replace(first, slice_bytes=4 * first.slice_bytes, credit_bytes=4 * first.credit_bytes)
    plan = replace(plan, candidates=(plan.candidates[0], PlanCandidate(rival, 1.0)))
    plan.write(file)
    assert [p.name for p in plan.parameters] == [p.name for p in parameters()]

    env = {"HVD_ORDER_PLAN": str(file)}
    (choices, lines, _), (other_settings, other_lines, _) = two_ranks.run(body_settle, env)
    assert choices == other_settings
    assert {candidate.slice_settings for candidate in plan.candidates} < set(choices)
    assert choices[2] == plan.candidates[0].slice_settings  # the plan's is the first
    assert any(
        settings.policy == "arrival" for settings in choices
    )  # those of runs without plan come as well
    assert lines[0].startswith(f"following the plan {file}: slices of")
    assert "to be tried" in lines[0]
    assert sum(line.startswith("chosen:") for line in lines) == 1
    assert other_lines == []
    confirmed = read_plan(file).confirmed
    assert confirmed is not None
    assert (confirmed.slice_settings, confirmed.ranks) == (choices[-1], 2)
    assert 1e-4 < confirmed.step_s < 1.0
    assert replace(read_plan(file), confirmed=None) == plan

    (choices, lines, _), _ = two_ranks.run(body_settle, env)
    assert set(choices[2:]) == {confirmed.slice_settings}
    assert "without trials" in lines[0]


BEFORE_S, AFTER_S = 0.01, 0.04


def sleeps_longer_later() -> Iterator[float]:
    """More sleep once the choice has stood for some steps, until trials have begun and ended.

    What the ranks decide together decides here too, so all of them see the same.
    """
    steady = 0
    for _ in range(MOST):
        yield BEFORE_S
        host = engine_host()
        steady = steady + 1 if host.tuning_ended else 0
        if steady == 50:
            break
    begun = False
    for _ in range(MOST):
        yield AFTER_S
        begun |= not host.tuning_ended
        if begun and host.tuning_ended:
            return


def body_drift(env: dict[str, str]) -> Run:
    """Looks come every 30 steps instead of twice a minute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drift_detector, "INTERVAL_S", 0.0)
        patch.setattr(drift_detector, "LEAST_STEPS", 30)
        return train(env, sleeps_longer_later(), None, 0)


@pytest.mark.timeout(240)
def test_trials_begin_again_on_all_ranks_when_a_layer_takes_longer(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    plan_of(SliceSettings(128 * KIB, 256 * KIB)).write(file)
    env = {"HVD_ORDER_PLAN": str(file)}
    (choices, lines, _), (other_settings, other_lines, _) = two_ranks.run(
        body_drift, env, timeout=150
    )
    assert choices == other_settings
    again = [line for line in lines if line.endswith("trying again")]
    assert float(again[-1].split()[2]) >= AFTER_S  # "steps take 0.041 s, where they took ..."
    assert other_lines == []
    runs = [list(group) for _, group in groupby(choices)]
    steady = max(range(len(runs)), key=lambda i: len(runs[i]))  # the choice, before the drift
    trials = [run[0] for run in runs[steady + 1 :]]
    assert len(set(trials)) >= 3
    assert any(settings.policy == "arrival" for settings in trials)
    assert any(settings.slice_bytes == 64 * KIB for settings in trials)  # of the link as it is now
    assert sum(line.startswith("chosen:") for line in lines) == len(again) + 1
    confirmed = read_plan(file).confirmed
    assert confirmed is not None
    assert confirmed.slice_settings == choices[-1]
    assert confirmed.step_s >= AFTER_S
