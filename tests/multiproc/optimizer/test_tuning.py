"""Slice settings are chosen while a job trains: all ranks alike, and the result is not touched."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.jobs import new_job
from helpers.logged import logged
from helpers.on_ranks import on_ranks
from helpers.ranks import RankPool
from torch import nn

import hvd_order.torch as hvd
from hvd_order.base.link.link_model import LinkModel
from hvd_order.base.link.slice_settings import SliceSettings
from hvd_order.engine import link_probe
from hvd_order.engine.engine_host import engine_host

MOST_STEPS = 2000  # more than all trials take
A_FEW_STEPS = 20  # enough for the first trials to begin, where there are any


def network() -> nn.Module:
    """More bytes than the largest slice, so that there is something to try."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(300, 900), nn.ReLU(), nn.Linear(900, 900), nn.ReLU(), nn.Linear(900, 10)
    ).double()


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, 300, generator=generator, dtype=torch.double)


Run = tuple[list[SliceSettings], list[Any], list[str]]


def body_train(env: dict[str, str], steps: int = MOST_STEPS) -> Run:
    """Trains until trials are over and a few steps more, at most ``steps`` in all.

    Returns:
        Each step's slice settings, the weights, and what was logged.
    """
    choices: list[SliceSettings] = []
    after_tuning = 0
    with logged() as lines, new_job(env):
        model = network()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
            named_parameters=model.named_parameters(),
        )
        for step in range(steps):
            optimizer.zero_grad()
            model(batch(step, hvd.rank())).square().mean().backward()
            optimizer.step()
            choices.append(engine_host().slice_settings)
            after_tuning += engine_host().tuning_ended
            if after_tuning > A_FEW_STEPS:
                break
        weights = [p.detach().numpy().copy() for p in model.parameters()]
    return choices, weights, lines


def one_process(size: int, steps: int) -> list[torch.Tensor]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        torch.stack([model(batch(step, r)).square().mean() for r in range(size)]).mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def test_trials_change_the_cut_everywhere_at_once_and_the_weights_nowhere(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    file = tmp_path / "trace.json"
    first, second = two_ranks.run(body_train, {"HVD_ORDER_TIMELINE": str(file)})
    choices, weights, lines = first
    assert second[0] == choices
    assert all((a == b).all() for a, b in zip(weights, second[1], strict=True))
    # Of each kind at least one was tried, and one of them is in use at the end.
    kinds = {(each.policy, each.agreement, each.cross_iteration) for each in choices[2:]}
    assert {
        ("priority", "leader", True),
        ("priority", "planned", True),
        ("arrival", "planned", True),
        ("arrival", "planned", False),
    } <= kinds
    assert len(set(choices[-A_FEW_STEPS:])) == 1
    assert choices[-1] in choices[2:-A_FEW_STEPS]
    for ours, plain in zip(weights, one_process(2, len(choices)), strict=True):
        torch.testing.assert_close(torch.from_numpy(ours), plain, rtol=1e-6, atol=1e-12)
    assert len(lines) == 2, lines
    chosen, gain = lines  # the choice, and what order can gain here
    assert chosen.startswith("chosen: slices of")
    assert gain.startswith("a step takes")
    assert second[2] == []
    # The timeline has every byte of every step, however it was cut.
    size_bytes: Counter[int] = Counter()
    for event in json.loads(file.read_text())["traceEvents"]:
        if event.get("cat") == "transfer":
            size_bytes[event["args"]["step"]] += event["args"]["bytes"]
    assert sorted(size_bytes) == list(range(len(choices)))
    (whole,) = set(size_bytes.values())
    assert whole >= sum(p.nbytes for p in network().parameters())


def test_what_the_user_sets_stays(two_ranks: RankPool) -> None:
    env = {"HVD_ORDER_SLICE_BYTES": "128KiB", "HVD_ORDER_CREDIT_BYTES": "1MiB"}
    choices, _, _ = two_ranks.run(body_train, env, A_FEW_STEPS)[0]
    (only,) = set(choices[2:])
    assert (only.slice_bytes, only.credit_bytes) == (2**17, 2**20)
    assert (only.policy, only.agreement, only.cross_iteration) == ("priority", "leader", True)


@pytest.mark.parametrize(
    "agreement", ["leader", pytest.param("negotiated", marks=pytest.mark.long)]
)
def test_an_agreement_that_the_user_sets_is_in_all_trials(
    two_ranks: RankPool, agreement: str
) -> None:
    choices, _, _ = two_ranks.run(body_train, {"HVD_ORDER_AGREEMENT": agreement})[0]
    assert {each.agreement for each in choices} == {agreement}
    assert len(set(choices)) > 3


@pytest.mark.parametrize(
    "env", [{"HVD_ORDER_TUNE": "0"}, {"HVD_ORDER_POLICY": "arrival"}], ids=["off", "arrival"]
)
def test_without_trials_the_measured_transport_decides(
    two_ranks: RankPool, env: dict[str, str]
) -> None:
    choices, _, _ = two_ranks.run(body_train, env, A_FEW_STEPS)[0]
    assert len(set(choices[2:])) == 1
    assert choices[-1].policy == env.get("HVD_ORDER_POLICY", "priority")


@on_ranks(2)
def test_a_model_that_only_one_rank_has_forgotten() -> None:
    kept = []
    with new_job({}):
        for _ in range(2):
            model = network()
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-2))
            if hvd.rank() == 1:
                kept.append(optimizer)
        for step in range(A_FEW_STEPS):
            optimizer.zero_grad()
            model(batch(step, hvd.rank())).square().mean().backward()
            optimizer.step()
    assert len(kept) == 2 * hvd.rank()


LINK = LinkModel(latency_s=1e-4, slice_cost_s=5e-5, seconds_per_byte=1e-9)


def body_advice() -> list[str]:
    with (
        pytest.MonkeyPatch.context() as patch,
        new_job({"HVD_ORDER_TUNE": "0"}),
        logged() as lines,
    ):
        patch.setattr(link_probe, "measure", lambda *_: LINK)  # a busy host measures anything
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(300, 800), nn.ReLU(), nn.Linear(800, 10))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1e-3), model.named_parameters()
        )
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(4, 300)).square().mean().backward()
            optimizer.step()
    return [line for line in lines if "of gradients need" in line]


def test_rank_0_says_once_what_order_can_gain(two_ranks: RankPool) -> None:
    """Without trials; behind them: above."""
    (line,), nothing = two_ranks.run(body_advice)
    assert nothing == []
    assert re.match(r"0\.99\d MB of gradients", line)
    assert "(2 ranks)" in line
    assert "hvd-order advise" in line
