"""Time that a step spends outside of torch's operators is in its profile, at its place."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hvd_order.base.link.link_model import LinkModel
from hvd_order.planning.files.outside import is_outside, outside_line
from hvd_order.planning.files.profile import Profile, Timing, read_profile
from hvd_order.planning.graph.graph import Graph, GraphOp, GraphParameter
from hvd_order.planning.orders.registry import order
from hvd_order.planning.profiling.profiler import record_profile
from hvd_order.planning.steps.program import steady_step_s
from hvd_order.tools.cli.main import main

TICK_S = 1e-6
FORWARD_S, BACKWARD_S, LOADING_S = 1.0, 2.0, 4.0


class FakeClock:
    """A clock that each look at it moves by a tick, and work by as long as it says."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += TICK_S
        return self.now


CLOCK = FakeClock()


class Wait(torch.autograd.Function):
    """Work that no operator shows, in both directions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        CLOCK.now += FORWARD_S
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        gradient = grads[0] * 1.0
        CLOCK.now += BACKWARD_S
        return gradient


class NumpyScale(torch.autograd.Function):
    """Scales by a weight; no operator reads the weight or writes its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        factors = weight.detach().numpy()
        CLOCK.now += FORWARD_S
        return torch.from_numpy(x.detach().numpy() * factors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = (t.detach().numpy() for t in ctx.saved_tensors)
        gradient = grads[0].numpy()
        CLOCK.now += BACKWARD_S
        return (
            torch.from_numpy(gradient * weight),
            torch.from_numpy((gradient * x).sum(0)),
        )


class ExtensionScale(NumpyScale):
    """The same, by an extension that knows addresses only."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        seen = np.empty(weight.numel(), np.float32)
        address = seen.ctypes.data_as(ctypes.c_void_p)
        ctypes.memmove(address, weight.data_ptr(), weight.nbytes)
        CLOCK.now += FORWARD_S
        return torch.from_numpy(x.detach().numpy() * seen)


class Scale(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function.apply(x, self.weight)


class Waits(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return Wait.apply(x)


def model_with(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), *layers, nn.Linear(8, 8))


def profiled(
    model: nn.Module, forward: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> Profile:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        data = torch.randn(4, 8)
        CLOCK.now += LOADING_S
        optimizer.zero_grad()
        (forward or model)(data).square().mean().backward()
        optimizer.step()

    return record_profile(step, model.named_parameters(), clock=CLOCK)


def long_ops(graph: Graph, seconds: float) -> list[int]:
    """Places of the ops for time outside that take about ``seconds``, and not the other waits."""
    return [
        i
        for i, op in enumerate(graph.ops)
        if is_outside(op) and 0.9 < op.duration_s / seconds < 1.1
    ]


def first_reader(graph: Graph, name: str) -> int:
    return graph.readers[graph.parameter_position[name]][0]


def last_producer(graph: Graph, name: str) -> int:
    return graph.producers[graph.parameter_position[name]][-1]


def test_waits_stand_between_the_layers_around_them() -> None:
    profile = profiled(model_with(Waits()))
    graph = profile.graph("median")
    (forward,) = long_ops(graph, FORWARD_S)
    (backward,) = long_ops(graph, BACKWARD_S)
    assert graph.ops[forward].phase == "forward"
    assert first_reader(graph, "0.weight") < forward < first_reader(graph, "2.weight")
    assert graph.ops[backward].phase == "backward"
    assert last_producer(graph, "2.weight") < backward < last_producer(graph, "0.weight")
    assert not graph.ops[backward].produces
    line = outside_line(profile)
    assert line is not None
    assert line.startswith("100% of the step")
    assert "in forward, between the first reads of '0.weight' and '2.weight'" in line
    assert re.search(r"between the gradients of '2\.(weight|bias)' and '0\.(weight|bias)'", line)


def test_the_ops_add_up_to_the_step_and_so_does_its_prediction() -> None:
    profile = profiled(model_with(Waits(), Waits()))
    graph = profile.graph("median")
    step_s = 2 * (FORWARD_S + BACKWARD_S)
    # A step has some hundred ticks, whether it is recorded or not.
    assert graph.compute_s == pytest.approx(step_s, abs=1e-3)
    link = LinkModel(latency_s=0.0, slice_cost_s=0.0, seconds_per_byte=1e-9)
    predicted = steady_step_s(graph, order("due_date", graph, link), link)
    assert predicted == pytest.approx(step_s, abs=1e-3)
    assert "between steps" in profile.machine
    assert profile.machine["between steps"].startswith("4000 ms"), "loading is no work of the step"


@pytest.mark.parametrize("function", [NumpyScale, ExtensionScale])
def test_work_on_a_parameter_reads_it_and_makes_its_gradient(
    function: type[torch.autograd.Function],
) -> None:
    graph = profiled(model_with(Scale(function))).graph("median")
    (forward,) = long_ops(graph, FORWARD_S)
    (backward,) = long_ops(graph, BACKWARD_S)
    assert first_reader(graph, "0.weight") < first_reader(graph, "1.weight") <= forward
    assert forward < first_reader(graph, "2.weight")
    assert last_producer(graph, "2.weight") < backward <= last_producer(graph, "1.weight")
    assert backward < last_producer(graph, "0.weight")
    # What reads memory that no operator has written waits for who wrote it.
    assert graph.ops[forward].name in graph.ops[first_reader(graph, "2.weight")].inputs


def test_a_gradient_that_is_held_back_is_released_after_the_wait() -> None:
    class Late(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, weight)
            return x * weight

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x, weight = ctx.saved_tensors
            result = grads[0] * weight, (grads[0] * x).sum(0)
            CLOCK.now += BACKWARD_S
            return result

    graph = profiled(model_with(Scale(Late))).graph("median")
    (backward,) = long_ops(graph, BACKWARD_S)
    assert last_producer(graph, "1.weight") == backward


def test_a_function_without_modules_is_placed_as_well() -> None:
    model = model_with()

    def forward(x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.linear(x, model[0].weight, model[0].bias)
        return nn.functional.linear(Wait.apply(x), model[1].weight, model[1].bias)  # type: ignore[no-untyped-call]

    graph = profiled(model, forward).graph("median")
    (place,) = long_ops(graph, FORWARD_S)
    assert first_reader(graph, "0.weight") < place < first_reader(graph, "1.weight")
    assert graph.compute_s == pytest.approx(FORWARD_S + BACKWARD_S, abs=1e-2)


@pytest.mark.parametrize(("outside_s", "says"), [(0.04, False), (0.06, True)])
def test_up_to_five_percent_are_not_worth_a_line(outside_s: float, says: bool) -> None:
    seconds = {"forward/Linear/addmm": 1 - outside_s, "forward/Linear/outside": outside_s}
    ops = (
        GraphOp("forward/Linear/addmm", 0.0, reads=("a",)),
        GraphOp("forward/Linear/outside", 0.0),
    )
    profile = Profile(
        "one",
        {},
        (GraphParameter("a", 4),),
        ops,
        {name: Timing.of([s] * 5) for name, s in seconds.items()},
    )
    line = outside_line(profile)
    assert (line is not None) == says
    if line is not None:
        assert line.startswith("6% of the step (60 ms)")
        assert "behind the first read of 'a'" in line


SCRIPT = """
import time
import torch
class Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.02)
        return gradient
a, b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)
model = torch.nn.Sequential(a, b)
optimizer = torch.optim.Adam(model.parameters())
while True:
    optimizer.zero_grad()
    b(Wait.apply(a(torch.randn(4, 8)))).square().mean().backward()
    optimizer.step()
"""


def test_the_command_says_how_much_and_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    assert main(["profile", "--steps", "5", str(script)]) == 0
    said = capsys.readouterr().out
    assert "of the step (" in said
    # Which of a layer's two gradients comes first is autograd's choice.
    where = r"in backward, between the gradients of '1\.(weight|bias)' and '0\.(weight|bias)'"
    assert re.search(where, said)
    profile = read_profile(tmp_path / "train.profile.json")
    assert {timing.runs for timing in profile.timings.values()} == {5}
    assert profile.graph("median").compute_s >= 0.02, "the wait lasts that long at least"
