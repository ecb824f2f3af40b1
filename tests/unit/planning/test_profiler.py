"""A step, operator by operator, as a dependency graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hvd_order.base.errors import InvalidUsage
from hvd_order.planning.files.outside import is_outside
from hvd_order.planning.files.profile import Profile, read_profile
from hvd_order.planning.graph.graph import Graph, GraphOp
from hvd_order.planning.profiling.profiler import Profiler, record_profile
from hvd_order.tools.cli.main import main


def step_of(
    model: torch.nn.Module, data: torch.Tensor, loss: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        loss(model(data)).backward()
        optimizer.step()

    return step


def recorded(model: torch.nn.Module, data: torch.Tensor) -> Graph:
    step = step_of(model, data, lambda y: y.square().mean())
    return record_profile(step, model.named_parameters(), warm_up=1).graph()


def depends(graph: Graph, op: GraphOp, other: GraphOp) -> bool:
    """Whether `op` needs the result of `other`, directly or not."""
    by_name = {each.name: each for each in graph.ops}
    seen, left = set(), [op.name]
    while left:
        name = left.pop()
        if name == other.name:
            return True
        if name not in seen:
            seen.add(name)
            left += by_name[name].inputs
    return False


def readers(graph: Graph, parameter: str, phase: str) -> list[GraphOp]:
    return [op for op in graph.ops if parameter in op.reads and op.phase == phase]


def producer(graph: Graph, parameter: str) -> GraphOp:
    (found,) = [op for op in graph.ops if parameter in op.produces and not is_outside(op)]
    return found


def test_a_chain_is_recorded_as_one() -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])
    graph = recorded(model, torch.randn(4, 8))
    assert [p.name for p in graph.parameters] == [name for name, _ in model.named_parameters()]
    assert [p.size_bytes for p in graph.parameters] == [256, 32] * 3
    first, second, third = (readers(graph, f"{i}.weight", "forward")[0] for i in range(3))
    assert depends(graph, second, first)
    assert depends(graph, third, second)
    assert "/addmm" in first.name
    assert "Sequential.1/" in second.name, "named after the module that runs it"
    for i in range(3):
        assert depends(graph, producer(graph, f"{i}.weight"), third)
    # The gradient of a weight does not need that of the layer before it.
    assert not depends(graph, producer(graph, "2.weight"), producer(graph, "0.weight"))
    updates = [op for op in graph.ops if op.phase == "update"]
    assert updates
    assert not any(op.reads for op in updates)
    assert any(depends(graph, op, producer(graph, "0.weight")) for op in updates)


class Branches(torch.nn.Module):
    """Two branches that join, and a shortcut past both."""

    def __init__(self) -> None:
        super().__init__()
        self.left = torch.nn.Linear(8, 8)
        self.right = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.relu(self.left(x)) + self.right(x) + x


def test_branches_do_not_wait_for_each_other() -> None:
    graph = recorded(Branches(), torch.randn(4, 8))
    (left,) = readers(graph, "left.weight", "forward")
    (right,) = readers(graph, "right.weight", "forward")
    assert not depends(graph, left, right)
    assert not depends(graph, right, left)
    join = graph.ops[max(graph.op_position[op] for op in (left.name, right.name)) + 1]
    assert depends(graph, join, left) or depends(graph, join, right)


class Tied(torch.nn.Module):
    """An embedding whose weight is the output layer's, an LSTM between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(20, 8)
        self.lstm = torch.nn.LSTM(8, 8, batch_first=True)
        self.out = torch.nn.Linear(8, 20, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(self.embedding(tokens))[0])


def test_a_tied_weight_is_one_parameter_with_two_readers() -> None:
    graph = recorded(Tied(), torch.randint(20, (2, 5)))
    names = [p.name for p in graph.parameters]
    assert names.count("embedding.weight") == 1
    assert "out.weight" not in names
    first, second = readers(graph, "embedding.weight", "forward")
    assert depends(graph, second, first)
    # Its gradient is done when both parts have been added.
    last = producer(graph, "embedding.weight")
    assert depends(graph, last, producer(graph, "lstm.weight_hh_l0"))


def test_steps_that_differ_are_refused() -> None:
    model = torch.nn.Linear(4, 4)
    profiler = Profiler(dict(model.named_parameters()))
    for number in range(6):
        with profiler:
            y = model(torch.randn(2, 4))
            (y.relu() if number % 2 else y).sum().backward()
    with pytest.raises(InvalidUsage, match="at most 3 of them"):
        profiler.profile()


def test_one_step_that_differs_does_no_harm() -> None:
    model = torch.nn.Linear(4, 4)
    profiler = Profiler(dict(model.named_parameters()))
    for number in range(6):
        model.zero_grad()
        with profiler:
            y = model(torch.randn(2, 4))
            (y.relu() if number == 2 else y).sum().backward()
    profile = profiler.profile("small")
    assert {timing.runs for timing in profile.timings.values()} == {5}
    assert not any("relu" in op.name for op in profile.ops)


SCRIPT = """
import sys
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters())
for step in range(int(sys.argv[1])):
    optimizer.zero_grad()
    try:
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    except Exception:
        pass
print("trained to the end")
"""


def test_a_script_is_profiled_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    assert main(["profile", "--steps", "5", str(script), "1000000"]) == 0
    said = capsys.readouterr().out
    assert "4 parameters" in said
    assert "trained to the end" not in said, "it is stopped when enough is known"
    profile: Profile = read_profile(tmp_path / "train.profile.json")
    assert [p.name for p in profile.parameters] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert {op.phase for op in profile.ops} == {"forward", "backward", "update"}
    assert {name for op in profile.ops for name in op.produces} == {
        p.name for p in profile.parameters
    }


def test_a_script_that_ends_too_soon_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    assert main(["profile", "--steps", "5", str(script), "4"]) == 2
    assert "ended after 4 optimizer steps" in capsys.readouterr().err
