"""A plan file holds what ``Compression.auto`` chose, and a later run begins with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.jobs import new_job
from helpers.logged import logged
from helpers.ranks import RankPool
from torch import nn

import hvd_order.torch as hvd
from hvd_order.base.link.link_model import LinkModel
from hvd_order.base.link.slice_settings import SliceSettings
from hvd_order.base.plan.plan_file import Confirmed, Plan, PlanCandidate, read_plan
from hvd_order.engine.engine_host import engine_host
from hvd_order.planning.graph.graph import GraphParameter

SLOW = LinkModel(0.0, 0.0, 1e-6)  # seconds a byte: nothing but the bytes counts
MOST = 2000  # steps, more than all trials take
SHORT = 6  # steps: two to learn, and some with the plan


def network(layers: int = 3) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*[nn.Linear(96, 96) for _ in range(layers)])


def plan_of(confirmed: Confirmed | None, layers: int = 3) -> Plan:
    settings = SliceSettings(64 * 2**10, 128 * 2**10)
    sizes = [GraphParameter(n, p.nbytes) for n, p in network(layers).named_parameters()]
    return Plan("layers", 2, SLOW, "by hand", tuple(sizes), (PlanCandidate(settings, 0.01),), 0.005,
                confirmed=confirmed)  # fmt: skip


def chosen(*coded: str) -> Confirmed:
    return Confirmed(SliceSettings(32 * 2**10, 64 * 2**10), 0.01, 2, coded)


@dataclass
class Run:
    """What one rank has seen."""

    in_codes: list[list[str]]  # after each step
    lines: list[str]
    tuned: bool
    settings: SliceSettings
    weights: torch.Tensor


def body_train(plan: str, compression: str, keep: list[str], steps: int | None) -> Run:
    """Takes so many steps; None: until trials are over, and some more."""
    how: Any = getattr(hvd.Compression, compression)
    with logged() as lines, new_job({"HVD_ORDER_PLAN": plan}):
        host = engine_host(0, range(hvd.size()))
        host._link = SLOW
        model = network()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1e-3), model.named_parameters(),
            compression=how(keep=keep) if keep else how,
        )  # fmt: skip
        in_codes, after = [], 0
        for step in range(MOST if steps is None else steps):
            optimizer.zero_grad()
            numbers = torch.Generator().manual_seed(step + 7 * hvd.rank())
            model(torch.randn(4, 96, generator=numbers)).square().mean().backward()
            optimizer.step()
            in_codes.append([each.name for each in optimizer.compression_report()])
            after += host.tuning_ended
            if steps is None and after > SHORT:
                break
        optimizer.flush()
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        return Run(in_codes, lines, host.tuning_ended, host.slice_settings, weights)


@pytest.mark.parametrize("names", [["0.weight"], ["0.weight", "2.weight"], []])
def test_a_run_begins_with_the_plans_choice_without_trials(
    two_ranks: RankPool, tmp_path: Path, names: list[str]
) -> None:
    file = tmp_path / "plan.json"
    plan_of(chosen(*names)).write(file)
    runs = two_ranks.run(body_train, str(file), "auto", [], SHORT)
    for run in runs:
        assert run.tuned
        assert run.in_codes[2:] == [names] * (SHORT - 2), "two steps learn the order"
        assert run.settings.coded == bool(names)
        assert (run.settings.slice_bytes, run.settings.credit_bytes) == (32 * 2**10, 64 * 2**10)
    assert torch.equal(runs[0].weights, runs[1].weights)
    (line,) = [line for line in runs[0].lines if "following the plan" in line]
    assert "without trials" in line
    assert ("codes of fewer bits" in line) == bool(names)
    assert read_plan(file).confirmed == chosen(*names), "nothing new was measured"


@pytest.mark.parametrize(
    ("coded", "compression", "keep"),
    [
        (None, "auto", []),  # by a run that did not choose
        (("0.weight", "2.weight"), "auto", ["2."]),  # one of them now has to stay exact
        (("0.weight",), "none", []),
        ((), "int8", []),
    ],
)
def test_a_choice_that_this_run_would_not_have_is_tried_anew(
    two_ranks: RankPool, tmp_path: Path, coded: Any, compression: str, keep: list[str]
) -> None:
    file = tmp_path / "plan.json"
    plan_of(Confirmed(SliceSettings(32 * 2**10, 64 * 2**10), 0.01, 2, coded)).write(file)
    for run in two_ranks.run(body_train, str(file), compression, keep, SHORT):
        assert not run.tuned
        if keep:
            assert not any("2.weight" in names for names in run.in_codes)
        if run.lines:
            assert any("to be tried against others" in line for line in run.lines)


def test_a_plan_whose_names_the_model_lacks_is_not_followed(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    plan_of(chosen("0.weight", "3.weight"), layers=4).write(file)
    before = file.read_bytes()
    runs = two_ranks.run(body_train, str(file), "auto", [], SHORT)
    assert not runs[0].tuned
    assert any("is not followed" in line and "3.weight" in line for line in runs[0].lines)
    assert file.read_bytes() == before


def test_what_trials_choose_is_what_the_next_run_begins_with(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    plan_of(None).write(file)
    first = two_ranks.run(body_train, str(file), "auto", [], None)[0]
    assert first.tuned
    assert {tuple(names) for names in first.in_codes} >= {(), ("0.weight", "1.weight", "2.weight")}
    confirmed = read_plan(file).confirmed
    assert confirmed is not None
    assert confirmed.coded == tuple(first.in_codes[-1])
    again = two_ranks.run(body_train, str(file), "auto", [], SHORT)[0]
    assert again.tuned
    assert again.in_codes[2:] == [first.in_codes[-1]] * (SHORT - 2)
