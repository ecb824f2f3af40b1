"""One timeline of all ranks, the report about it, and ranges in PyTorch's profiler."""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.jobs import new_job
from helpers.on_ranks import on_ranks
from torch import nn

import hvd_order.torch as hvd
from hvd_order.planning.report.trace.content import report_of, text_of
from hvd_order.planning.report.trace.exposed import exposed_waits
from hvd_order.planning.report.trace_file import read_job_trace

STEPS = 4
SETTINGS = {
    "HVD_ORDER_TUNE": "0",
    "HVD_ORDER_SLICE_BYTES": "64KiB",
    "HVD_ORDER_CREDIT_BYTES": "128KiB",
}
_US = 2.0  # of rounding
Event = dict[str, Any]


class Training:
    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(
            nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 8)
        )
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.01), self.model.named_parameters()
        )

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            self.model(torch.randn(4, 64)).square().mean().backward()
            self.optimizer.step()


def events_of(trace: Path) -> tuple[list[Event], dict[str, Any]]:
    document = json.loads(trace.read_text("utf-8"))
    return document["traceEvents"], document["otherData"]


def spans(events: list[Event], category: str, rank: int) -> list[tuple[float, float, Event]]:
    found = [e for e in events if e.get("cat") == category and e["ph"] == "X" and e["pid"] == rank]
    return sorted(((e["ts"], e["ts"] + e["dur"], e) for e in found), key=lambda each: each[:2])


def check_passes(events: list[Event], rank: int) -> None:
    both = spans(events, "compute", rank)
    names = [each["name"] for _, _, each in both]
    assert names == ["forward", "backward"] * STEPS, names
    for (_, end, _), (begin, _, _) in pairwise(both):
        assert end <= begin + _US


def check_arrows(events: list[Event], rank: int) -> None:
    arrows: dict[str, list[Event]] = defaultdict(list)
    for each in events:
        if each["ph"] in "stf" and each["pid"] == rank:
            arrows[each["id"]].append(each)
    assert len(arrows) == len(spans(events, "transfer", rank))
    rows = {e["tid"]: spans(events, e["args"]["name"], rank) for e in events
            if e["ph"] == "M" and e["name"] == "thread_name" and e["pid"] == rank}  # fmt: skip
    ends = Counter()
    for arrow in arrows.values():
        kinds = "".join(each["ph"] for each in arrow)
        assert kinds in ("sf", "stf", "sttf"), kinds
        ends[len(kinds)] += 1
        times = [each["ts"] for each in arrow]
        assert times == sorted(times)
        for each in arrow:  # a point of an arrow lies in an event of its row
            row = rows[each["tid"]]
            assert any(a - _US <= each["ts"] <= b + _US for a, b, _ in row), each
    assert ends[4] > 0  # to a reader


def check_shared_clock(events: list[Event], error_us: float) -> None:
    times: dict[tuple[int, int], dict[int, tuple[float, float]]] = defaultdict(dict)
    for rank in range(2):
        for begin, end, each in spans(events, "transfer", rank):
            times[each["args"]["step"], each["args"]["slice"]][rank] = begin, end
    shared = [both for both in times.values() if len(both) == 2]
    assert len(shared) > 0.8 * len(times)
    for both in shared:  # nobody has a sum that another has not sent
        assert both[0][0] <= both[1][1] + error_us + _US
        assert both[1][0] <= both[0][1] + error_us + _US


def check_report(trace: Path) -> None:
    job = read_job_trace(trace)
    waits = exposed_waits(job)
    assert any(each.parts is not None for each in waits)
    for each in waits:
        if each.parts is not None:
            parts = each.parts.late, each.parts.queue, each.parts.transfer
            assert min(parts) >= -_US
            assert sum(parts) == pytest.approx(each.us, abs=_US)
    text = text_of(report_of(job, trace.name))
    assert f"2 ranks, {STEPS} steps" in text
    assert "No suggestion: a simulation needs" not in text


def check_ranges(training: Training) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        training.steps(2)
        training.optimizer.flush()
    names = {each.key for each in profiler.key_averages()}
    assert "hvd_order::update" in names
    parameters = {name for name, _ in training.model.named_parameters()}
    waited = {n.removeprefix("hvd_order::wait ") for n in names if n.startswith("hvd_order::wait ")}
    assert waited
    assert waited <= parameters


@on_ranks(2)
def test_one_trace_has_what_all_ranks_did(tmp_path: Path) -> None:
    with new_job(SETTINGS):
        training = Training()
        training.steps(8)
        # Whether all ranks stop the recording, or rank 0 alone does.
        for stops in ("all", "one"):
            trace = tmp_path / f"{stops}.json"
            training.steps(1)  # leaves updates to the first step that is recorded
            hvd.barrier()
            hvd.start_timeline(str(trace))
            training.steps(STEPS)
            training.optimizer.flush()
            if stops == "all":
                hvd.stop_timeline()
            else:
                hvd.barrier()
                if hvd.rank() == 0:
                    hvd.stop_timeline()
            hvd.barrier()  # rank 0 has written it
            events, about = events_of(trace)
            assert about["ranks"] == [0, 1]
            assert about["missing"] == {}
            assert 0 < about["clock_error_us"] < 1e5
            for rank in range(2):
                check_passes(events, rank)
                check_arrows(events, rank)
            check_shared_clock(events, about["clock_error_us"])
            check_report(trace)
        check_ranges(training)


@on_ranks(2)
def test_rank_0_waits_for_no_rank_that_does_not_record(tmp_path: Path) -> None:
    trace = tmp_path / "of all.json"
    with new_job({**SETTINGS, "HVD_ORDER_TIMELINE": str(trace)}):
        if hvd.rank() == 1:  # its part goes nowhere
            hvd.stop_timeline()
            hvd.start_timeline(str(tmp_path / "{rank} own.json"))
        hvd.barrier()
        training = Training()
        training.steps(3)
        training.optimizer.flush()
        hvd.barrier()
    # shutdown() has written both.
    events, about = events_of(trace)
    assert about["ranks"] == [0, 1]  # rank 1's first part, without a transfer
    assert spans(events, "transfer", 0)
    assert not spans(events, "transfer", 1)
    own, about = events_of(tmp_path / "1 own.json")
    assert about["ranks"] == [1]
    assert spans(own, "transfer", 1)
    with new_job(SETTINGS):
        hvd.barrier()
        if hvd.rank() == 0:
            hvd.start_timeline(str(trace))
        Training().steps(3)
        if hvd.rank() == 0:
            began = time.monotonic()
            hvd.stop_timeline()
            assert time.monotonic() - began < 10
            assert events_of(trace)[1]["missing"] == {"does not record": [1]}
        hvd.barrier()
