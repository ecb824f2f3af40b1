"""The forward passes of a timeline, beside the clock of the program."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.jobs import new_job
from helpers.on_ranks import on_ranks
from torch import nn

import hvd_order.torch as hvd

STEPS = 4


def train(trace: Path, span: str) -> list[tuple[float, float, float, float]]:
    """Records the last steps of a few.

    Returns:
        Microseconds at the last begin of `step()`, at begin and end of the forward pass, and at the
        end of the backward pass.
    """
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters()
    )
    times, stepping = [], 0.0
    for step in range(12):
        if step == 12 - STEPS:
            hvd.start_timeline(str(trace))
        optimizer.zero_grad()
        inputs = torch.randn(4, 64)
        began = time.monotonic_ns() / 1e3
        with hvd.timeline_span(span):
            loss = model(inputs).square().mean()
        computed = time.monotonic_ns() / 1e3
        loss.backward()
        backward = time.monotonic_ns() / 1e3
        times.append((stepping, began, computed, backward))
        optimizer.step()
        stepping = backward
    optimizer.flush()
    hvd.stop_timeline()
    return times[-STEPS:]


def forwards(trace: Path) -> list[tuple[float, float]]:
    events: list[dict[str, Any]] = json.loads(trace.read_text("utf-8"))["traceEvents"]
    return sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == "forward")


@pytest.mark.parametrize("deferred", [True, False])
@on_ranks(2)
def test_forward_passes_are_found(tmp_path: Path, deferred: bool) -> None:
    with new_job({"HVD_ORDER_TUNE": "0", "HVD_ORDER_CROSS_ITERATION": str(int(deferred))}):
        times = train(tmp_path / "{rank}.json", "mine")
    found = forwards(tmp_path / f"{hvd.rank()}.json")
    # Nothing before the first step says when its forward pass has begun, if step() has updated all.
    expected = times if deferred else times[1:]
    assert len(found) == len(expected), (found, times)
    for (first, last), (stepping, began, computed, backward) in zip(found, expected, strict=True):
        if deferred:
            assert began <= first <= computed
        else:  # inside of step(), at the end of the update
            assert stepping <= first <= began
        assert computed <= last <= backward


@on_ranks(2)
def test_a_programs_own_forward_passes_are_the_only_ones(tmp_path: Path) -> None:
    with new_job({"HVD_ORDER_TUNE": "0"}):
        times = train(tmp_path / "{rank}.json", "forward")
    found = forwards(tmp_path / f"{hvd.rank()}.json")
    assert len(found) == STEPS
    for (first, last), (_, began, computed, _) in zip(found, times, strict=True):
        assert began <= first < last <= computed
