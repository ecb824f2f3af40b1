"""TIC and TAC orders from a plan file hold on the lines: of pulls, of pushes and of answers."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.flags import wait_until
from helpers.ranks import RankPool
from helpers.servers import Servers, job, servers_of_job
from torch import Tensor, nn

import hvd_order.torch as hvd
from hvd_order.base.link.link_model import LinkModel
from hvd_order.base.link.slice_settings import SliceSettings
from hvd_order.base.plan.plan_file import Plan, PlanCandidate
from hvd_order.engine.engine_host import engine_host
from hvd_order.planning.graph.graph import Graph, GraphOp, GraphParameter
from hvd_order.planning.orders.registry import order
from hvd_order.servers.process import messages

SLICE_BYTES = 4096
LINK = LinkModel(0.0, 0.0, 1e-7)
PULLS = 50
# A line has three frames on its way, and one more may be about to go: none overtakes these.
FILLING = 4
OUTPUT = ".weight"


class Branching(nn.Module):
    """Three branches that meet; consumed in the order in which they are written down."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.stem = nn.Linear(64, 64, bias=False)
        self.left = nn.Linear(64, 256, bias=False)
        self.left_out = nn.Linear(256, 64, bias=False)
        self.right = nn.Linear(64, 128, bias=False)
        self.right_out = nn.Linear(128, 64, bias=False)
        self.join = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        met = self.stem(x) + self.left_out(self.left(x)) + self.right_out(self.right(x))
        joined: Tensor = self.join(met)
        return joined


def graph() -> Graph:
    """Of that model on a device where the right branch takes long."""
    parameters = tuple(GraphParameter(n, p.nbytes) for n, p in Branching().named_parameters())
    steps: Mapping[str, tuple[float, tuple[str, ...]]] = {
        "stem": (1e-3, ()),
        "left": (1e-3, ()),
        "left_out": (1e-3, ("left",)),
        "right": (20e-3, ()),
        "right_out": (5e-3, ("right",)),
        "join": (1e-3, ("stem", "left_out", "right_out")),
    }
    ops = tuple(
        GraphOp(name, seconds, inputs, (name + OUTPUT,))
        for name, (seconds, inputs) in steps.items()
    )
    return Graph(parameters, ops)


def ordered_by(heuristic: str) -> list[GraphParameter]:
    whole = graph()
    priorities = order(heuristic, whole, LINK)
    return sorted(whole.parameters, key=lambda parameter: priorities[parameter.name])


def write_plan(path: Path, heuristic: str) -> None:
    settings = SliceSettings(SLICE_BYTES, 4 * SLICE_BYTES)
    parameters = tuple(ordered_by(heuristic))
    candidates = (PlanCandidate(settings, 0.01),)
    plan = Plan("branching", 2, LINK, heuristic, parameters, candidates, 0.005)
    plan.write(path)


# ---------------------------------------------------------------------------------- in a rank


def body_orders(env: Mapping[str, str], servers: Sequence[int], trace: str) -> dict[str, Any]:
    """Pulls the model, then makes a step whose gradients all come while the servers stand still.

    Args:
        servers: process ids.
        trace: file for the timeline of that step.

    Returns:
        By slice its name and its server; the order in which each pull's slices came; of the step,
        the order in which answers came.
    """
    with job(env):
        model = Branching()
        optimizer: Any = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9),
            named_parameters=model.named_parameters(),
        )

        def loss(step: int) -> Tensor:
            numbers = torch.Generator().manual_seed(step + 7 * hvd.rank())
            return model(torch.randn(8, 64, generator=numbers)).square().mean()

        for step in range(4):
            loss(step).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.flush()
        host, transport = engine_host(), servers_of_job().transport
        (number,) = host.models
        layout = host.layouts[number]
        names = [layout.slice_name(i) for i in range(len(layout.slices))]
        pulled = [transport.pull(number, 1, 30.0) for _ in range(PULLS)]
        hvd.start_timeline(trace)
        value = loss(4)
        _all(servers, signal.SIGSTOP, "T")
        try:
            for server in range(len(servers)):
                for _ in range(FILLING):
                    transport.send_control(server, messages.ask("late"))
            value.backward()
            optimizer.step()
            hvd.barrier()  # all gradients are with the lines, on both ranks
        finally:
            _all(servers, signal.SIGCONT, "RSD")
        optimizer.flush()
        hvd.stop_timeline()
        owners = [owner for owner, _ in transport.places(number)]
        # The credit, a slice for each server, admits what comes first, whatever its urgency.
        mine = trace.replace("{rank}", str(hvd.rank()))
        answered = _of_step(mine, names, early=len(servers))
        return {"names": names, "owners": owners, "pulled": pulled, "answered": answered}


def _all(processes: Sequence[int], what: signal.Signals, states: str) -> None:
    """All ranks together; returns when the processes are in one of these states."""
    hvd.barrier()
    if hvd.rank() == 0:
        for process in processes:
            os.kill(process, what)
        for process in processes:
            status = Path(f"/proc/{process}/stat")
            wait_until(
                lambda status=status: status.read_text().rpartition(") ")[2][0] in states,
                f"process {process} heeds {what.name}", 10,
            )  # fmt: skip
    hvd.barrier()


def _of_step(trace: str, names: Sequence[str], early: int) -> list[int]:
    """Slices in the order in which their answers came, but those that were issued first."""
    spans = [
        event
        for event in json.loads(Path(trace).read_text())["traceEvents"]
        if event.get("cat") == "transfer"
    ]
    issued = sorted(spans, key=lambda event: event["ts"])
    ended = sorted(issued[early:], key=lambda event: event["ts"] + event["dur"])
    return [names.index(event["name"]) for event in ended]


# ----------------------------------------------------------------------------------- in pytest


def run(
    ranks: RankPool, folder: Path, heuristic: str | None, more: Mapping[str, str]
) -> list[dict[str, Any]]:
    env = {
        "HVD_ORDER_SLICE_BYTES": str(SLICE_BYTES), "HVD_ORDER_CREDIT_BYTES": str(SLICE_BYTES),
        "HVD_ORDER_PS_BALANCE": "0", **more,
    }  # fmt: skip
    if heuristic is not None:
        file = folder / "plan.json"
        write_plan(file, heuristic)
        env["HVD_ORDER_PLAN"] = str(file)
    with Servers(ranks.size, 2, env) as servers:
        trace = str(folder / "trace{rank}.json")
        results: list[dict[str, Any]] = ranks.run(
            body_orders, servers.env, servers.pids, trace, timeout=120
        )
        assert servers.wait() == [0, 0]
    return results


def inversions(order: Sequence[int]) -> int:
    """Pairs of neighbours whose second is the more urgent."""
    return sum(a > b for a, b in pairwise(order))


def tensors(names: Sequence[str]) -> list[str]:
    """Whose slices these are, in their order; each tensor once if its slices are together."""
    found: list[str] = []
    for name in names:
        tensor = name.partition("[")[0]
        if found[-1:] != [tensor]:
            found.append(tensor)
    return found


def is_part_of(found: Sequence[str], whole: Sequence[str]) -> bool:
    """Whether ``found`` is ``whole`` with some tensors left out."""
    left = iter(whole)
    return all(name in left for name in found)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("heuristic", [pytest.param("tic", marks=pytest.mark.long), "tac"])
def test_pulls_pushes_and_answers_follow_the_plan(
    two_ranks: RankPool, tmp_path: Path, heuristic: str
) -> None:
    planned = [parameter.name for parameter in ordered_by(heuristic)]
    written = [name for name, _ in Branching().named_parameters()]
    other = [parameter.name for parameter in ordered_by("tac" if heuristic == "tic" else "tic")]
    assert planned != written
    assert planned != other
    results = run(two_ranks, tmp_path, heuristic, {})
    for result in results:
        # Slices are numbered by urgency, and that is the plan's.
        assert tensors(result["names"]) == planned
        for arrived in result["pulled"]:
            assert sorted(arrived) == list(range(len(result["names"])))
            for line in by_line(arrived, result["owners"]):
                assert tensors([result["names"][i] for i in line]) == planned
                assert inversions(line) == 0
        for line in by_line(result["answered"], result["owners"]):
            assert is_part_of(tensors([result["names"][i] for i in line]), planned)
            assert inversions(line) == 0


@pytest.mark.long
@pytest.mark.timeout(200)
def test_without_a_plan_the_order_is_that_of_reading(two_ranks: RankPool, tmp_path: Path) -> None:
    results = run(two_ranks, tmp_path, None, {})
    for result in results:
        assert tensors(result["names"]) == [name for name, _ in Branching().named_parameters()]
        for line in by_line(result["answered"], result["owners"]):
            assert inversions(line) == 0


@pytest.mark.long
@pytest.mark.timeout(200)
def test_unordered_lines_do_not_follow_the_plan(two_ranks: RankPool, tmp_path: Path) -> None:
    results = run(two_ranks, tmp_path, "tac", {"HVD_ORDER_POLICY": "arrival"})
    for result in results:
        for line in by_line(result["answered"], result["owners"]):
            assert inversions(line) > 0


def by_line(order: Sequence[int], owners: Sequence[int]) -> list[list[int]]:
    """The same for each server's line."""
    return [[i for i in order if owners[i] == server] for server in sorted(set(owners))]
