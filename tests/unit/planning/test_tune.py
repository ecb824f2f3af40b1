"""What the search prefers, and the command around it."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from helpers.oracles import graphs

from hvd_order.base.errors import InvalidUsage
from hvd_order.base.link.link_model import LinkModel
from hvd_order.base.plan.plan_file import read_plan
from hvd_order.planning.files.profile import MeasuredLink, Profile, Timing
from hvd_order.planning.graph.graph import Graph, GraphOp, GraphParameter
from hvd_order.planning.predict.network import Network
from hvd_order.planning.predict.tune import Tuned, tune
from hvd_order.tools.cli.main import main

MIB = 2**20


def model(layers: int = 12, size_bytes: int = 8 * MIB) -> Graph:
    """A chain whose first layer is large: its gradient comes last and is needed first."""
    sizes = [4 * size_bytes, *[size_bytes] * (layers - 1)]
    return graphs.chain([5e-3] * layers, [10e-3] * layers, sizes)


def network(graph: Graph, wire_s: float, latency_s: float = 1e-4) -> Network:
    """Four ranks that need ``wire_s`` for the gradients of a step."""
    total = sum(p.size_bytes for p in graph.parameters)
    return Network.of_ring(4, 1.5 * total / wire_s, latency_s)


def gain(tuned: Tuned) -> float:
    return tuned.ddp_s / tuned.chosen.step_s


def test_order_wins_most_where_wire_and_computation_are_alike() -> None:
    graph = model()
    compute_s = graph.compute_s
    fast, equal, slow = (
        tune(graph, network(graph, wire_s))
        for wire_s in (compute_s / 50, compute_s, 50 * compute_s)
    )
    assert gain(equal) > 1.1
    assert gain(equal) > gain(fast)
    assert gain(equal) > gain(slow)
    assert equal.chosen.step_s < 1.1 * equal.bound_s
    assert equal.chosen.setting.slice_settings.policy == "priority"
    # ByteScheduler's defaults are for other networks; the search has their settings to choose from.
    assert all(equal.chosen.step_s < each.step_s for each in equal.published.values())


def test_large_slices_where_each_is_dear() -> None:
    graph = model()
    cheap, dear = (tune(graph, network(graph, graph.compute_s, s)) for s in (1e-5, 5e-3))
    cheap_settings, dear_settings = (
        cheap.chosen.setting.slice_settings,
        dear.chosen.setting.slice_settings,
    )
    assert cheap_settings.slice_bytes < dear_settings.slice_bytes


def test_split_sums_win_where_a_program_clips() -> None:
    graph = model()
    for wire_s in (graph.compute_s / 50, graph.compute_s, 50 * graph.compute_s):
        plain, clipped = (tune(graph, network(graph, wire_s), clipped=c) for c in (False, True))
        assert plain.whole is None
        assert not any(each.setting.slice_settings.split for each in plain.outcomes)
        assert clipped.whole is not None
        assert not clipped.whole.setting.slice_settings.split
        assert clipped.default.setting.slice_settings.split
        assert clipped.ddp_s == plain.ddp_s, "it awaits all sums anyway"
        assert plain.bound_s <= clipped.bound_s * (1 + 1e-9)
        assert clipped.bound_s <= clipped.chosen.step_s
        if wire_s == graph.compute_s:
            assert clipped.chosen.setting.slice_settings.split
            assert clipped.chosen.step_s < 0.95 * clipped.whole.step_s
            assert clipped.plan.slice_settings.split


def test_thousands_of_operators_and_hundreds_of_settings_take_seconds() -> None:
    graph = graphs.resnet_152()
    begin_s = time.process_time()
    tuned = tune(graph, network(graph, graph.compute_s))
    assert time.process_time() - begin_s < 15
    assert tuned.simulated > 500
    assert tuned.chosen.step_s < 1.1 * tuned.bound_s < tuned.ddp_s


def test_what_does_not_travel_needs_no_plan() -> None:
    graph = model()
    with pytest.raises(InvalidUsage, match="with one rank nothing travels"):
        tune(graph, Network.of_ring(1, 1e9))
    with pytest.raises(InvalidUsage, match="no parameter of the graph has a gradient"):
        tune(
            Graph((GraphParameter("w", 4),), (GraphOp("f", 1.0, reads=("w",)),)),
            Network.of_ring(2, 1e9),
        )


def profile(link: MeasuredLink | None) -> Profile:
    graph = model(8, MIB)
    timings = {op.name: Timing(5, op.duration_s, op.duration_s, 0.0) for op in graph.ops}
    frozen = GraphParameter("table", 4096)
    return Profile("chain", {}, (*graph.parameters, frozen), graph.ops, timings, link)


def test_the_command_prints_a_table_and_writes_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "profile.json", tmp_path / "plan.json"
    profile(MeasuredLink(LinkModel(2e-4, 1e-4, 1e-8), 2, "gloo")).write(source)
    assert main(["tune", str(source), "-o", str(target)]) == 0
    out = capsys.readouterr().out
    plan = read_plan(target)
    assert (plan.model, plan.ranks) == ("chain", 2)
    assert [p.name for p in plan.parameters] == [f"w{i}" for i in range(8)]
    assert [p.name for p in plan.idle] == ["table"]
    rows = {line[:26].strip(): line for line in out.splitlines() if " ms" in line}
    assert set(rows) >= {
        "chosen, in the plan", "default", "ByteScheduler, 1e6 / 4e6", "ByteScheduler, 8e6 / 16e6",
        "DDP, buckets of 25 MiB", "bound",
    }  # fmt: skip
    ratios = {name: float(row.split()[-1]) for name, row in rows.items()}
    assert ratios["bound"] == 1.0
    assert 1.0 <= ratios["chosen, in the plan"] <= ratios["default"]
    assert re.search(r"\d+ settings simulated", out)
    assert f"HVD_ORDER_PLAN={target}" in out

    assert (
        main(["tune", str(source), "--ranks", "8", "--bandwidth", "1gbit", "-o", str(target)]) == 0
    )
    assert read_plan(target).ranks == 8
    assert "8 workers, 1 Gbit/s" in capsys.readouterr().out


def test_the_command_for_a_program_that_clips(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "profile.json", tmp_path / "plan.json"
    profile(MeasuredLink(LinkModel(2e-4, 1e-4, 1e-8), 2, "gloo")).write(source)
    assert main(["tune", str(source)]) == 0
    plain = capsys.readouterr().out
    assert "sums" not in plain
    assert main(["tune", str(source), "--clipped", "-o", str(target)]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if " KiB" in line]
    forms = {row[:26].strip(): row[59:65].strip() for row in rows}
    assert forms["default"] == "halves"
    assert forms["best of whole sums"] == forms["ByteScheduler, 1e6 / 4e6"] == "whole"
    plan = read_plan(target)
    assert forms["chosen, in the plan"] == ("halves" if plan.slice_settings.split else "whole")


def test_the_command_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "profile.json"
    profile(None).write(source)
    assert main(["tune", str(source)]) == 2
    assert "--bandwidth and --ranks must be given" in capsys.readouterr().err
    assert main(["tune", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err
