"""What 8 bits gain in a predicted step: ``Compression.auto`` on recorded graphs."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.oracles.graphs import chain
from helpers.schemas import printed

from hvd_order.base.link.link_model import LinkModel
from hvd_order.planning.bounds.bound import program_optimum_s
from hvd_order.planning.files.profile import Profile, Timing
from hvd_order.planning.graph.graph import Graph, GraphOp
from hvd_order.planning.predict.coded import coded_bytes
from hvd_order.planning.predict.network import Network
from hvd_order.planning.predict.simulate import AllReduceScenario, TransferSchedule, simulate
from hvd_order.planning.predict.what_if import WayName, WhatIf
from hvd_order.planning.predict.workload import workload_of
from hvd_order.tools.cli.main import main

MB = 10**6
BITS = 8.125 / 32
PER_MB = LinkModel(0.0, 0.0, 1 / MB)  # one MB a second
NETWORK = Network(2, PER_MB, 0.0, lanes=1)
THREE_LAYERS = chain([1, 1, 1], [1, 1, 1], [6 * MB, MB, MB])


def with_bytes(graph: Graph, wire_bytes: dict[str, int]) -> Graph:
    sizes = [(p, wire_bytes.get(p.name, p.size_bytes)) for p in graph.parameters]
    return Graph(tuple(replace(p, size_bytes=size) for p, size in sizes), graph.ops)


# --- the vector --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wire_bytes", "step_s"),
    [
        ({}, 12),
        ({"w0": 3 * MB}, 9),
        ({"w0": MB}, 7),
        ({"w1": 16, "w2": 16}, 12),
        ({"w0": int(6 * MB * BITS)}, 6 + 6 * BITS),
    ],
)
def test_only_the_layer_that_the_next_step_waits_for_matters(
    wire_bytes: dict[str, int], step_s: float
) -> None:
    slices = TransferSchedule(MB // 100, MB // 50)
    played = simulate(
        workload_of(THREE_LAYERS, wire_bytes=wire_bytes), AllReduceScenario(0.0, 1 / MB), slices
    )
    assert played.steady_s == pytest.approx(step_s, rel=5e-3)
    assert program_optimum_s(with_bytes(THREE_LAYERS, wire_bytes), PER_MB) == pytest.approx(step_s)


def test_the_vector_of_three_layers() -> None:
    assert coded_bytes(THREE_LAYERS, PER_MB) == {"w0": int(6 * MB * BITS)}
    what_if = WhatIf(THREE_LAYERS, NETWORK)
    assert what_if.coded == ["w0"]
    assert what_if.ways == ["today", "arrival", "order", "coded"]
    outlook = what_if.outlook()
    assert outlook.order_s == pytest.approx(12, rel=0.02)
    assert outlook.coded_s == pytest.approx(6 + 6 * BITS, rel=0.02)
    step = what_if.step("coded")
    assert step.step_s == pytest.approx(outlook.coded_s)
    assert {sent.size_bytes for sent in step.sent if sent.name.startswith("w1")} == {
        sent.size_bytes for sent in what_if.step("order").sent if sent.name.startswith("w1")
    }


# --- when ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("ratio", [0.25, 0.5, 1.0, 4 / 3, 2.0, 4.0, 8.0])
def test_codes_come_where_the_link_is_the_limit_and_no_more_than_it_needs(
    ratio: float, clipped: bool
) -> None:
    """docs/theory.md, "When order, when fewer bytes"; in seconds, forward 1, backward 2."""
    layers, communication = 60, 3 * ratio
    size = int(100 * communication * MB / layers)
    graph = chain([1 / layers] * layers, [2 / layers] * layers, [size] * layers)
    network = Network(2, LinkModel(0.0, 0.0, 1e-8), 0.0, lanes=1)
    what_if = WhatIf(graph, network, clipped=clipped)
    found = what_if.outlook()
    if ratio <= 1:
        assert what_if.coded == []
        assert found.coded_s is None
        assert "coded" not in what_if.ways
        return
    assert found.coded_s == pytest.approx(max(3, communication * BITS), rel=0.05)
    slower = communication / 0.8  # the link keeps pace at so much of its rate
    needed = (slower - 3) / (slower * (1 - BITS))
    assert len(what_if.coded) == pytest.approx(min(needed, 1) * layers, abs=2)
    assert what_if.coded == [f"w{i}" for i in sorted(int(name[1:]) for name in what_if.coded)]


def test_no_choice_gives_a_clearly_shorter_bound() -> None:
    for seed in range(40):
        pick = random.Random(seed)
        layers = pick.randint(1, 6)
        forward, backward = ([pick.uniform(0.1, 2) for _ in range(layers)] for _ in range(2))
        graph = chain(forward, backward, [pick.randint(1, 6 * MB) for _ in range(layers)])
        names = [p.name for p in graph.parameters]
        coded = {p.name: int(p.size_bytes * BITS) for p in graph.parameters}
        shortest = min(
            program_optimum_s(with_bytes(graph, {n: coded[n] for n in some}), PER_MB)
            for count in range(layers + 1)
            for some in itertools.combinations(names, count)
        )
        chosen = coded_bytes(graph, PER_MB)
        bound_s = program_optimum_s(with_bytes(graph, chosen), PER_MB)
        assert bound_s <= max(shortest, 1.005 * graph.compute_s) + 1e-5, seed
        predicted = WhatIf(graph, NETWORK).outlook().coded_s
        assert predicted is None or predicted >= bound_s * (1 - 1e-9), seed


def test_work_of_updates_is_computation_too() -> None:
    ops = (*THREE_LAYERS.ops, GraphOp("u", 4.0, ("b0",), phase="update"))
    graph = Graph(THREE_LAYERS.parameters, ops)
    assert coded_bytes(graph, PER_MB) == {"w0": int(6 * MB * BITS)}
    assert coded_bytes(Graph(graph.parameters, (*ops, GraphOp("v", 2.0, ("u",)))), PER_MB) == {}


def test_halves_cost_what_two_slices_cost() -> None:
    costly = replace(NETWORK, link=LinkModel(0.0, 0.02, 1 / MB))
    what_if = WhatIf(THREE_LAYERS, costly)
    assert what_if.coded == ["w0"]
    costs_s: dict[WayName, float] = {"order": 0.02, "coded": 0.04}
    for name, cost_s in costs_s.items():
        step = what_if.step(name)
        slices = {each.name: each.size_bytes for each in step.sent}  # of this step or the last
        bytes_s = sum(slices.values()) / MB
        busy_s = sum(end_s - begin_s for begin_s, end_s in step.links["link"])
        assert busy_s == pytest.approx(bytes_s + cost_s * len(slices), rel=0.02), name


def test_updates_take_as_long_as_without() -> None:
    ops = (*THREE_LAYERS.ops, GraphOp("u", 0.8, ("b0",), phase="update"))
    work = workload_of(Graph(THREE_LAYERS.parameters, ops), wire_bytes={"w0": MB})
    played = simulate(work, AllReduceScenario(0.0, 0.0), TransferSchedule(), steps=4, recorded=2)
    took = {each.parameter: each.end_s - each.start_s for each in played.updates()}
    assert took == pytest.approx({0: 0.6, 1: 0.1, 2: 0.1})


def test_servers_and_frameworks_without_codes_have_none() -> None:
    ring = Network.of_ring(2, MB)
    assert WhatIf(THREE_LAYERS, ring, servers=1).coded == []
    assert WhatIf(THREE_LAYERS, ring, encodes=False).outlook().coded_s is None


# --- the commands --------------------------------------------------------------------------------


def profile_of(path: Path, machine: dict[str, str]) -> Path:
    graph = chain([0.01] * 10, [0.02] * 10, [12 * MB] * 10)
    varied = (1, 0.999, 1.001, 1, 1)
    timings = {op.name: Timing.of([op.duration_s * f for f in varied]) for op in graph.ops}
    Profile("ten layers", machine, graph.parameters, graph.ops, timings).write(path)
    return path


def test_commands_say_what_8_bits_gain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = profile_of(tmp_path / "p.json", {})
    slow, fast = (["--bandwidth", rate, "--ranks", "4"] for rate in ("1gbit", "100gbit"))
    here = printed(capsys, 0, "advise", profile, *slow)["networks"][3]
    assert here["coded_gradients"] == 10
    assert here["coded_s"] == pytest.approx(here["wire_s"] * BITS, rel=0.2)
    fact = (
        f"compression=hvd.Compression.auto would take 10 of 10 gradients to 8 bits: "
        f"{here['coded_s'] * 1e3:.2f} ms instead of {here['order_s'] * 1e3:.2f} ms."
    )
    for command in ("advise", "plan"):
        picture = ["--no-png"] * (command == "plan")
        assert main([command, str(profile), *slow, *picture]) == 0
        said = capsys.readouterr().out
        assert fact in said.splitlines()
        assert "with 8 bits" in said
        assert main([command, str(profile), *fast, *picture]) == 0
        assert "Compression.auto would take" not in capsys.readouterr().out
    planned = printed(capsys, 0, "plan", profile, *slow)
    assert planned["coded"] == [f"w{i}" for i in range(10)]
    assert planned["steps"][-1]["step_s"] == pytest.approx(here["coded_s"], rel=0.02)
    assert printed(capsys, 0, "plan", profile, *fast)["coded"] == []

    of_tensorflow = profile_of(tmp_path / "t.json", {"tensorflow": "2"})
    assert main(["advise", str(of_tensorflow), *slow]) == 0
    assert "8 bits" not in capsys.readouterr().out
    assert printed(capsys, 0, "advise", of_tensorflow, *slow)["networks"][3]["coded_s"] is None


def test_predict_has_a_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = profile_of(tmp_path / "p.json", {})
    options = ["--workers", "1,2,4", "--bandwidth", "1gbit"]
    alone, two, four = printed(capsys, 0, "predict", profile, *options)["throughput"]
    assert alone["coded_steps_per_s"] is None
    step = printed(capsys, 0, "plan", profile, "--ranks", "4", "--bandwidth", "1gbit")["steps"][-1]
    assert four["coded_steps_per_s"] == pytest.approx(4 / step["step_s"], rel=0.02)
    assert two["coded_steps_per_s"] > 2.5 * two["steps_per_s"]
    assert main(["predict", str(profile), *options]) == 0
    assert "with 8 bits" in capsys.readouterr().out
    assert main(["predict", str(profile), *options, "--servers", "1"]) == 0
    assert "with 8 bits" not in capsys.readouterr().out
