"""Traces of torch.profiler as profiles, compared with what the project's own profiler records."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from hvd_order.base.errors import InvalidUsage
from hvd_order.planning.files.chrome_trace import profile_of_trace
from hvd_order.planning.files.profile import read_profile
from hvd_order.planning.graph.graph import Graph
from hvd_order.planning.profiling.profiler import record_profile
from hvd_order.tools.cli.main import main

STEPS = 6


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on a busy machine take many times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Cnn(nn.Module):
    """Convolutions with a normalisation, a branch past them, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.shortcut = nn.Conv2d(3, 8, 1)
        self.out = nn.Linear(8 * 8 * 8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(torch.relu(self.norm(self.first(x)))) + self.shortcut(x)
        return self.out(functional.max_pool2d(torch.relu(y), 2).flatten(1))


class Branches(nn.Module):
    """Attention, an LSTM and a tied embedding: branches that autograd runs in its own order."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.lstm = nn.LSTM(16, 16, batch_first=True)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm = nn.LayerNorm(16)
        self.scale = nn.Parameter(torch.ones(()))
        self.weights = nn.Parameter(torch.ones(16, dtype=torch.bfloat16))
        self.out = nn.Linear(16, 20, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        y = self.attention(x, x, x, need_weights=False)[0] + self.lstm(x)[0] * self.scale
        return self.out(self.norm(y) * self.weights)


def training(model: nn.Module, data: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    return step


def write_trace(path: Path, step: Callable[[], None], steps: int = STEPS, **settings: Any) -> Path:
    """As docs/guides/planning.md says that a trace is to be recorded."""
    step()
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=steps)
    with torch.profiler.profile(
        **{
            "activities": [torch.profiler.ProfilerActivity.CPU],
            "schedule": schedule,
            "record_shapes": True,
            **settings,
        }
    ) as profiler:
        for _ in range(2 + steps):
            step()
            profiler.step()
    profiler.export_chrome_trace(str(path))
    return path


def read_in_order(graph: Graph) -> list[int]:
    """Bytes of all parameters in the order in which ops first read them."""
    first = [(readers[0], i) for i, readers in enumerate(graph.readers)]
    return [graph.parameters[i].size_bytes for _, i in sorted(first)]


def ready_in_order(graph: Graph) -> list[int]:
    """The same in the order in which their gradients are complete."""
    last = [(producers[-1], i) for i, producers in enumerate(graph.producers)]
    return [graph.parameters[i].size_bytes for _, i in sorted(last)]


def in_pairs(values: list[int]) -> list[list[int]]:
    """A layer's weight and bias, in any order."""
    return [sorted(values[i : i + 2]) for i in range(0, len(values), 2)]


@pytest.mark.parametrize(
    ("model", "data"),
    [
        (Cnn(), torch.randn(4, 3, 16, 16)),
        (Branches(), torch.randint(20, (4, 6))),
    ],
    ids=["cnn", "branches"],
)
def test_a_trace_tells_what_the_profiler_records(
    tmp_path: Path, model: nn.Module, data: torch.Tensor
) -> None:
    step = training(model, data)
    imported = profile_of_trace(write_trace(tmp_path / "trace.json", step))
    graph, own = imported.graph(), record_profile(step, model.named_parameters()).graph()
    assert read_in_order(graph) == read_in_order(own)
    assert sorted(ready_in_order(graph)) == sorted(ready_in_order(own))
    if isinstance(model, Cnn):  # whose layers autograd runs one after the other
        # An operator that makes two gradients makes both at once: there the order says nothing.
        assert in_pairs(ready_in_order(graph)) == in_pairs(ready_in_order(own))
    assert {op.phase for op in graph.ops} == {"forward", "backward", "update"}
    assert {timing.runs for timing in imported.timings.values()} == {STEPS}
    steps = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
             if str(e.get("name")).startswith("ProfilerStep")]  # fmt: skip
    assert 0 < graph.compute_s < min(step["dur"] for step in steps) / 1e6


def test_what_the_command_writes_can_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = training(Cnn(), torch.randn(4, 3, 16, 16))
    plain = write_trace(tmp_path / "cnn.json", step)
    packed = tmp_path / "cnn.pt.trace.json.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    output = tmp_path / "cnn.profile.json"
    assert main(["profile", "--from-trace", str(packed), "-o", str(output)]) == 0
    assert "10 parameters" in capsys.readouterr().out
    profile = read_profile(output)
    assert profile == profile_of_trace(packed)
    assert profile.model == "cnn"
    assert profile.link is None
    assert profile.machine["source"] == "trace of torch.profiler"
    # Without -o the profile lies beside the trace.
    assert main(["profile", "--from-trace", str(plain)]) == 0
    assert read_profile(tmp_path / "cnn.profile.json") == profile


def accumulating(model: nn.Module, data: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(2):
            model(data).sum().backward()
        optimizer.step()

    return step


@pytest.mark.parametrize(
    ("step", "settings", "message"),
    [
        (training, {"record_shapes": False}, "it has no shapes"),
        (training, {"schedule": None}, "does not say where steps begin"),
        (training, {"steps": 4}, "4 steps, of which at most 4 .* 5 are needed"),
        (accumulating, {}, "ran after backward had begun.*several backward passes"),
    ],
    ids=["no shapes", "no steps", "few steps", "accumulation"],
)
def test_a_trace_that_cannot_do_is_refused(
    tmp_path: Path,
    step: Callable[[nn.Module, torch.Tensor], Callable[[], None]],
    settings: dict[str, Any],
    message: str,
) -> None:
    trace = write_trace(tmp_path / "t.json", step(nn.Linear(4, 4), torch.randn(2, 4)), **settings)
    with pytest.raises(InvalidUsage, match=message) as raised:
        profile_of_trace(trace)
    assert str(trace) in str(raised.value)
    if settings:
        assert "record_shapes=True" in str(raised.value), "it says how to record it"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[]", "no Chrome trace"),
        ('{"traceEvents": 3}', "no Chrome trace"),
        ('{"traceEvents": []}', "where steps begin"),
        (
            json.dumps({"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a", "ts": "x"}]}),
            "\"ts\" of the event 'a' is 'x'",
        ),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(content)
    with pytest.raises(InvalidUsage, match=message):
        profile_of_trace(path)


def event(category: str, name: str, begin: float, end: float, **more: Any) -> dict[str, Any]:
    thread = more.pop("thread", 1)
    return {
        "ph": "X", "cat": category, "name": name, "pid": 7, "tid": thread,
        "ts": begin, "dur": end - begin, "args": more,
    }  # fmt: skip


def test_on_a_device_kernels_are_what_takes_time(tmp_path: Path) -> None:
    # As such a trace looks: backward in a thread of its own, kernels by the op's "External id".
    events = []
    for n in range(6):
        t, k = 1000.0 * n, 100 * n
        node = "autograd::engine::evaluate_function: "
        dims = {"Input Dims": [[5, 3]], "Input type": ["c10::Half"]}
        events += [
            event("user_annotation", f"ProfilerStep#{n}", t, t + 900),
            event("cpu_op", "aten::mm", t + 10, t + 20,
                  **{"External id": k + 1, "Sequence number": n, **dims}),
            event("cpu_op", node + "MmBackward0", t + 30, t + 40, thread=2,
                  **{"External id": k + 2, "Sequence number": n}),
            event("cpu_op", "aten::mm", t + 31, t + 39, thread=2, **{"External id": k + 3}),
            event("cpu_op", node + "torch::autograd::AccumulateGrad", t + 41, t + 45, thread=2,
                  **{"External id": k + 4}),
            event("cpu_op", "torch::autograd::AccumulateGrad", t + 42, t + 44, thread=2,
                  **{"External id": k + 5, **dims}),
            event("kernel", "gemm", t + 100, t + 300 + n, thread=9,
                  **{"External id": k + 1, "stream": 7}),
            event("kernel", "gemm", t + 300, t + 700, thread=9,
                  **{"External id": k + 3, "stream": 7}),
            event("kernel", "splitk_reduce", t + 700, t + 750, thread=9,
                  **{"External id": k + 3, "stream": 7}),
        ]  # fmt: skip
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": events, "deviceProperties": [{"name": "A"}]}))
    profile = profile_of_trace(path)
    assert profile.clock == "cuda_event"
    assert profile.machine["device"] == "A"
    assert [(p.name, p.size_bytes) for p in profile.parameters] == [("mm 5x3", 30)]
    forward, backward, accumulate = profile.ops
    assert {op.resource for op in profile.ops} == {"stream 7"}
    assert (forward.reads, accumulate.produces) == (("mm 5x3",), ("mm 5x3",))
    timing = profile.timings[forward.name]
    assert timing.minimum_s == pytest.approx(200e-6)
    assert timing.median_s == pytest.approx(202e-6)
    assert profile.timings[backward.name].minimum_s == pytest.approx(450e-6)  # of two kernels
    assert profile.timings[accumulate.name].median_s == 0
