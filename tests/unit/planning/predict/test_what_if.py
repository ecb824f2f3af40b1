"""Advice and what-if: networks by name, steps by hand, what is recommended, text, picture, page."""

from __future__ import annotations

import base64
import os
import random
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from helpers.oracles.graphs import chain, random_graph, with_backward
from helpers.schemas import printed

from hvd_order.base.errors import InvalidUsage
from hvd_order.base.link.advice import Outlook, advise, run_line
from hvd_order.base.link.link_fit import SliceStream, fit_link
from hvd_order.base.link.link_model import LinkModel
from hvd_order.planning.files.profile import MeasuredLink, Profile, Timing
from hvd_order.planning.graph.graph import Graph, GraphOp, GraphParameter
from hvd_order.planning.predict.network import Network
from hvd_order.planning.predict.simulate import AllReduceScenario, TransferSchedule, simulate
from hvd_order.planning.predict.units import parse_duration, parse_rate, rate_text
from hvd_order.planning.predict.what_if import WhatIf
from hvd_order.planning.predict.workload import consumption_order, workload_of
from hvd_order.tools.cli.main import main

MB = 10**6


# --- networks ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("10gbit", 1.25e9),
        ("10 Gbit/s", 1.25e9),
        ("400Mbit/s", 5e7),
        ("1.2GB/s", 1.2e9),
        ("500MiB/s", 500 * 2**20),
        ("2e3", None),
        ("10gb", None),
        ("0gbit", None),
        ("-1gbit", None),
        ("10tibit", None),
        ("fast", None),
    ],
)
def test_bandwidths_are_read_or_refused(text: str, bytes_per_s: float | None) -> None:
    if bytes_per_s is None:
        with pytest.raises(ValueError, match=re.escape(repr(text))):
            parse_rate(text)
    else:
        assert parse_rate(text) == pytest.approx(bytes_per_s)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("50us", 5e-5), ("0.2ms", 2e-4), ("1e-4", 1e-4), ("2 s", 2.0), ("20min", 1200), ("1d", 86400)],
)
def test_times_are_read(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)
    for wrong in (f"{text} ago", "-1ms", "1 week"):
        with pytest.raises(ValueError, match="expected a time"):
            parse_duration(wrong)


def test_bandwidths_are_written_as_people_do() -> None:
    assert [rate_text(parse_rate(t)) for t in ("10gbit", "400mbit", "56kbit", "8bit")] == [
        "10 Gbit/s", "400 Mbit/s", "56 kbit/s", "8 bit/s",
    ]  # fmt: skip


def test_a_measured_link_changes_with_ranks_as_a_ring_does() -> None:
    measured = MeasuredLink(LinkModel(1e-3, 3e-4, 8e-9), 2, "gloo")
    two, eight = Network.of_link(measured), Network.of_link(measured, 8)
    assert two.link == measured.link
    assert two.bytes_per_s == pytest.approx(1 / 8e-9)
    assert eight.bytes_per_s == pytest.approx(two.bytes_per_s), "the links are the same ones"
    assert eight.link.seconds_per_byte == pytest.approx(8e-9 * 1.75)
    assert eight.link.latency_s == pytest.approx(7e-3)
    ring = AllReduceScenario.ring(8, eight.message_latency_s, eight.bytes_per_s)
    ours = eight.all_reduce()
    assert (ours.latency_s, ours.seconds_per_byte, ours.sent_per_byte) == pytest.approx(
        (ring.latency_s, ring.seconds_per_byte, ring.sent_per_byte)
    )
    assert "measured" in str(two)
    assert "named" in str(two.at_rate(1e9))
    with pytest.raises(InvalidUsage, match="one rank"):
        Network.of_link(MeasuredLink(LinkModel(0, 0, 0), 1, "gloo"))


def test_a_fit_finds_the_line_and_survives_noise() -> None:
    sizes = (2**16, 2**18, 2**20, 2**22)
    exact = fit_link(1e-4, [SliceStream(n, 2e-4 + 1e-9 * n) for n in sizes])
    assert (exact.slice_cost_s, exact.seconds_per_byte) == pytest.approx((2e-4, 1e-9))
    noise = random.Random(1)
    near = fit_link(
        1e-4, [SliceStream(n, (2e-4 + 1e-9 * n) * noise.uniform(1, 1.1)) for n in sizes]
    )
    assert near.slice_cost_s == pytest.approx(2e-4, rel=0.2)
    assert near.seconds_per_byte == pytest.approx(1e-9, rel=0.2)
    # The cost is no less than half the latency, as where training measures.
    assert fit_link(1e-2, [SliceStream(n, 1e-9 * n) for n in sizes]).slice_cost_s == 5e-3
    flat = fit_link(0.0, [SliceStream(n, 1e-3) for n in sizes])
    assert flat.seconds_per_byte > 0
    falling = fit_link(0.0, [SliceStream(n, 1 / n) for n in sizes])
    assert falling.seconds_per_byte > 0
    for streams in ([SliceStream(1, 1.0)] * 2, [SliceStream(1, 0.0), SliceStream(2, 1.0)]):
        with pytest.raises(InvalidUsage):
            fit_link(0.0, streams)


# --- a profile as a workload -------------------------------------------------------------------


def test_a_workload_has_what_travels_in_the_order_in_which_it_is_read() -> None:
    graph = Graph(
        (GraphParameter("head", 300), GraphParameter("frozen", 50), GraphParameter("body", 100)),
        (
            GraphOp("f0", 1.0, reads=("body", "frozen")),
            GraphOp("f1", 1.0, ("f0",), reads=("head",)),
            GraphOp("b1", 2.0, ("f1",), produces=("head",), phase="backward"),
            GraphOp("b0", 2.0, ("b1",), produces=("body",), phase="backward"),
            GraphOp("u0", 0.3, ("b1",), phase="update"),
            GraphOp("u1", 0.1, ("b0", "u0"), phase="update"),
        ),
    )
    assert consumption_order(graph) == ["body", "head"]
    work = workload_of(graph)
    assert work.parameter_bytes == [100, 300]
    assert work.native.op_names == ["f0", "f1", "b1", "b0"]
    free = AllReduceScenario(latency_s=0.0, seconds_per_byte=0.0)
    played = simulate(work, free, TransferSchedule(), steps=4, recorded=2)
    assert played.steady_s == pytest.approx(6.4)
    took = {u.parameter: u.end_s - u.start_s for u in played.updates()}
    assert took == pytest.approx({0: 0.1, 1: 0.3}), "by bytes, both as long as their ops"
    assert workload_of(graph, {"head": 0, "frozen": 1, "body": 2}).parameter_bytes == [300, 100]


# --- steps by hand -----------------------------------------------------------------------------

# Two layers: forward 1 s each, backward 2 s each; the first layer's gradient takes the link for
# 3 s, the second one's for 4 s. Ranks: 2, so a byte of gradient is a byte of the link.
TWO_LAYERS = chain([1, 1], [2, 2], [300 * MB, 400 * MB])
HUNDRED_MB_PER_S = Network(2, LinkModel(0.0, 0.0, 1e-8), 0.0, lanes=1)


def test_todays_step_by_hand() -> None:
    # s      0     1     2     3     4     5     6     7     8     9     10    11
    # device f0    f1    b1 .......  b0 .......  (waits for the next step) ......
    # link                           w1 .....................  w0 ..............
    what_if = WhatIf(TWO_LAYERS, HUNDRED_MB_PER_S)
    step = what_if.step("today")
    assert step.step_s == pytest.approx(11)
    assert step.compute_s == pytest.approx(6)
    (link,) = step.links.values()
    assert link[0][0] == pytest.approx(4)
    assert link[-1][1] == pytest.approx(11)
    (idle,) = step.idle
    assert (idle.begin_s, idle.end_s, idle.until) == (0, pytest.approx(4), "w1")
    assert idle.cause == "nothing to send during forward and backward"
    (wait,) = step.waits
    assert (wait.begin_s, wait.end_s) == pytest.approx((6, 11))
    assert (wait.waiting, wait.awaited) == ("the next step", "w0")
    ((name, seconds),) = wait.behind
    assert (name, seconds) == ("w1", pytest.approx(2))
    assert step.overlap.efficiency == pytest.approx((13 - 11) / (13 - 7))
    assert step.overlap.speedup == pytest.approx(6 / 7)


def test_the_planned_step_by_hand() -> None:
    # The same with a small layer between the two, whose gradient comes shortly before the first.
    # s      0     1     2     3     4     5     6     7     8     9     10    11    12
    # device (waits for w0) .. f0    (w2)  f2    b2 .......  b1 .......
    # link   w0 .............. w2 .......        (nothing)   w2 .......                (w0 ...)
    graph = chain([1, 0, 1], [0.002, 1.998, 2], [300 * MB, 16, 400 * MB])
    what_if = WhatIf(graph, HUNDRED_MB_PER_S)
    assert what_if.wire_s == pytest.approx(7)
    assert what_if.bound_s == pytest.approx(10)
    step = what_if.step("order")
    assert step.step_s == pytest.approx(10, rel=0.01), "in slices, so a little longer"
    assert step.overlap.part_of_possible(what_if.bound_s) == pytest.approx(1, abs=0.02)
    first, second = sorted(step.waits, key=lambda wait: -wait.length_s)[:2]
    assert (first.waiting, second.waiting) == ("f0", "f2")
    assert (first.length_s, second.length_s) == pytest.approx((3, 1), abs=0.01)
    assert first.awaited.startswith("w0[")
    assert second.awaited.startswith("w2[")
    ahead = dict(second.behind)
    assert ahead["w0"] == pytest.approx(3, abs=0.01)
    idle = max(step.idle, key=lambda each: each.length_s)
    assert (idle.begin_s, idle.end_s) == pytest.approx((5, 8), abs=0.01)
    assert idle.cause.startswith("nothing to send")
    assert {sent.is_old for sent in step.sent} == {True, False}


def test_a_clipped_step_in_halves_by_hand() -> None:
    # Halves take 1.5 and 2 s; the squares, between s0 and g0, next to nothing.
    # s      0     1     2     3     4     5     6     7     8     9     10
    # device (waits for g0) .. f0 .. (g1)  f1 .. b1 ........ b0 ........
    # link   s0 ..... g0 ..... g1 ........                   s1 ........
    what_if = WhatIf(TWO_LAYERS, HUNDRED_MB_PER_S, clipped=True)
    assert what_if.ways == ["today", "arrival", "order", "split", "coded"]
    assert what_if.bound_s == pytest.approx(1.5 + 1.5 + 2 + 1 + 4)
    step = what_if.step("split")
    assert step.step_s == pytest.approx(10, rel=0.01)
    waits = sorted(step.waits, key=lambda wait: -wait.length_s)[:2]
    assert [wait.waiting for wait in waits] == ["f0", "f1"]
    assert [wait.length_s for wait in waits] == pytest.approx([3, 1], abs=0.05)
    assert waits[1].awaited.startswith("parts of w1[")
    assert {"squares"} < {sent.name for sent in step.sent}
    # Whole sums are awaited, in any order: 4 + 3 s from the end of backward 1.
    awaited = [what_if.step(name) for name in ("today", "arrival", "order")]
    assert [each.step_s for each in awaited] == pytest.approx([11, 11, 11], rel=0.01)
    assert awaited[2].waits[-1].waiting == "the next step"
    outlook = what_if.outlook()
    assert outlook.split_s == pytest.approx(step.step_s, rel=1e-3)
    assert outlook.gain == pytest.approx(0.1, abs=0.01)
    assert WhatIf(TWO_LAYERS, HUNDRED_MB_PER_S).outlook().split_s is None


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("servers", [None, 1, 3])
def test_no_way_beats_the_bound(servers: int | None, clipped: bool) -> None:
    if servers is not None and clipped:
        return
    for seed in range(12):
        pick = random.Random(seed)
        graph = with_backward(random_graph(pick, 6, 12, most_bytes=50 * MB, longest_s=0.1))
        network = Network.of_ring(pick.randint(2, 5), 10 ** pick.uniform(7.5, 10))
        outlook = WhatIf(graph, network, servers, clipped).outlook()
        least_s = outlook.bound_s * (1 - 1e-9)
        ways_s = [outlook.today_s, outlook.arrival_s, outlook.order_s]
        ways_s += [] if outlook.split_s is None else [outlook.split_s]
        assert min(ways_s) >= least_s, seed
        assert (len(ways_s) == 4) == clipped


def test_order_helps_with_servers_as_well() -> None:
    # All gradients cross a worker's link once up and once down, at the same time at best.
    what_if = WhatIf(TWO_LAYERS, Network.of_ring(4, 1e9), servers=4)
    outlook = what_if.outlook()
    assert outlook.wire_s == pytest.approx(0.7)
    assert outlook.order_s < outlook.today_s
    assert set(what_if.step("order").links) == {"worker 0 up", "worker 0 down"}
    # More servers than workers: each worker's own link is the narrowest.
    more = WhatIf(TWO_LAYERS, Network.of_ring(4, 1e9), servers=8).outlook()
    assert more.wire_s == pytest.approx(0.7)
    assert more.bound_s == pytest.approx(outlook.bound_s)


def test_nothing_to_send_is_said() -> None:
    two = Network.of_ring(2, 1e9)
    with pytest.raises(InvalidUsage, match=r"no parameter .* has a gradient"):
        WhatIf(Graph((), (GraphOp("a", 1.0),)), two)
    with pytest.raises(InvalidUsage, match="one worker"):
        WhatIf(TWO_LAYERS, Network.of_ring(1, 1e9))
    with pytest.raises(InvalidUsage, match="0 servers"):
        WhatIf(TWO_LAYERS, two, servers=0)
    with pytest.raises(InvalidUsage, match="leave out the servers or the clipping"):
        WhatIf(TWO_LAYERS, two, servers=1, clipped=True)
    with pytest.raises(InvalidUsage, match="'split'; expected one of today, arrival, order"):
        WhatIf(TWO_LAYERS, two).step("split")


# --- advice ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "wire_s", "ways_s", "mode", "reason"),
    [  # today, in order of arrival, by priority, and split where the program clips
        (8, 1.0, (1.8, 1.5, 1.1), "order", "64 % faster than today, of 80 %"),
        (8, 1.0, (1.8, 1.1, 1.2), "arrival", "small slices cost more"),
        (8, 1.0, (1.8, 1.101, 1.1), "order", "64 %"),
        (8, 0.01, (1.01, 1.0, 1.0), "none", "hidden already"),
        (8, 50.0, (50.5, 50.4, 50.4), "none", "the network is the limit"),
        (8, 1.0, (1.8, 1.9, 1.79), "none", "takes it up"),
        (1, 0.0, (1.0, 1.0, 1.0), "none", "one worker"),
        (8, 0.0, (1.0, 1.0, 1.0), "none", "no parameter"),
        (8, 1.0, (1.8, 1.6, 1.7, 1.2), "split", "50 % faster than today, of 80 %"),
        (8, 1.0, (1.8, 1.6, 1.7, 1.2), "split", "that are possible; whole "),
        (8, 1.0, (1.8, 1.6, 1.7, 1.2), "split", "are 33 % slower"),
        (8, 1.0, (1.8, 1.2, 1.7, 1.21), "split", "are as fast"),
        (8, 1.0, (1.8, 1.2, 1.7, 1.3), "arrival", "gains 50 %; twice as many slices cost more"),
        (8, 1.0, (1.8, 1.7, 1.2, 1.3), "order", "twice as many slices"),
        (8, 1.0, (1.8, 1.8, 1.79, 1.79), "none", "takes it up"),
    ],
)
def test_what_is_recommended(
    ranks: int, wire_s: float, ways_s: tuple[float, ...], mode: str, reason: str
) -> None:
    bound_s = max(1.0, wire_s)
    advice = advise(Outlook(ranks, 1.0, wire_s, *ways_s[:3], bound_s, *ways_s[3:]))
    assert (advice.mode, reason in advice.reason) == (mode, True), advice


def test_a_runs_line_says_what_follows_and_no_more() -> None:
    link = LinkModel(1e-3, 1e-4, 1e-8)
    # 8 s of wire in a step of 12 s: computation takes 4 s at least, so 8 s is the bound.
    line = run_line(link, 800 * MB, 4, 12.0)
    assert "800 MB of gradients need 8 s of the network in each step (4 ranks)" in line
    assert "with the best order 8 s at least" in line
    assert "20 s at most" in line
    assert "4 s if the network were 10 times faster" in line
    assert "80 s if the network were 10 times slower" in line
    assert "the network is the limit" in run_line(link, 800 * MB, 4, 8.1)
    assert "too short" in run_line(link, MB, 4, 12.0)
    assert "no step can be shorter" in run_line(link, MB, 4, None)
    assert "one worker" in run_line(link, MB, 1, 12.0)


# --- the commands ------------------------------------------------------------------------------


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """Ten layers: 0.3 s of computation, 120 MB of gradients."""
    return write_profile(tmp_path / "ten.profile.json", None)


def write_profile(path: Path, link: MeasuredLink | None) -> Path:
    graph = chain([0.01] * 10, [0.02] * 10, [12 * MB] * 10)
    timings = {
        op.name: Timing(5, op.duration_s, op.duration_s * 1.01, op.duration_s / 50)
        for op in graph.ops
    }
    Profile("ten<layers>", {}, graph.parameters, graph.ops, timings, link).write(path)
    return path


def test_advise_on_a_named_network(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", str(profile), "--bandwidth", "5gbit", "--ranks", "4"]) == 0
    said = capsys.readouterr().out
    rows = [line for line in said.splitlines() if "bit/s  " in line]
    assert len(rows) == 7
    assert rows[3].startswith("> 5 Gbit/s")
    assert rows[0].startswith("500 Mbit/s")
    assert rows[-1].startswith("50 Gbit/s")
    assert "Recommended: order" in said


def test_json_fits_the_schemas(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    network = ["--bandwidth", "5gbit", "--ranks", "4"]
    said = printed(capsys, 0, "advise", profile, *network)
    assert [row["bytes_per_s"] for row in said["networks"]][3] == 5e9 / 8
    assert said["networks"][3]["mode"] == "order"
    assert printed(capsys, 0, "advise", profile, "--ranks", "1")["networks"] == []
    planned = printed(capsys, 0, "plan", profile, *network)
    tuned = printed(capsys, 0, "tune", profile, *network)
    assert tuned["settings"]["best"]["step_s"] >= tuned["bound_s"]
    (run,) = printed(
        capsys, 0, "cluster", "run", "synthetic", "--jobs", "2", "--seeds", "1", "--until", "1h"
    )["runs"]  # fmt: skip
    assert run["metrics"]["jobs"] <= 2
    *whole, coded = planned["steps"]  # the bound is that of all bytes
    assert all(step["step_s"] >= planned["bound_s"] for step in whole)
    assert "8 bits" in coded["title"]
    assert coded["step_s"] < min(step["step_s"] for step in whole)
    assert planned["coded"]
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nimport horovod.torch as hvd\nhvd.init()\nmodel = torch.nn.Linear(1, 1)\n"
        "hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))\n"
    )
    found = printed(capsys, 1, "check", script)["findings"]
    assert found[0]["path"] == str(script)


def test_advise_to_a_program_that_clips(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    network = ["--bandwidth", "5gbit", "--ranks", "4"]
    assert main(["advise", str(profile), *network]) == 0
    plain = capsys.readouterr().out
    assert "halves" not in plain
    assert "clipped" not in plain
    assert main(["advise", str(profile), *network, "--clipped"]) == 0
    said = capsys.readouterr().out
    head, *rows = [
        line for line in said.splitlines() if line.startswith("link") or "bit/s  " in line
    ]
    assert "in halves" in head
    assert {len(row.split()) for row in rows[:3]} == {len(plain.splitlines()[3].split()) + 2}
    assert "gradients are clipped by their global norm" in said
    assert "Recommended: sums in halves" in said
    assert "whole sums, which have to arrive before the norm is known, are" in said


def test_plan_for_a_program_that_clips(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    network = ["--bandwidth", "5gbit", "--workers", "4", "--clipped", "--no-png"]
    assert main(["plan", str(profile), *network]) == 0
    said = capsys.readouterr().out
    assert "first first, in halves" in said
    assert "first first, all awaited" in said
    assert "waits for parts of w0" in said
    assert main(["plan", str(profile), *network, "--servers", "2"]) == 2
    assert "leave out the servers or the clipping" in capsys.readouterr().err


def test_advise_on_the_measured_network_and_on_none(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = MeasuredLink(LinkModel(1e-3, 2e-4, 1e-8), 2, "gloo")
    assert main(["advise", str(write_profile(tmp_path / "m.json", measured))]) == 0
    assert "2 workers, 800 Mbit/s (measured)" in capsys.readouterr().out
    assert main(["advise", str(profile)]) == 0
    said = capsys.readouterr().out
    assert "8 workers on usual networks" in said
    assert "Recommended" not in said
    assert "--bandwidth 10gbit" in said
    assert main(["advise", str(profile), "--ranks", "1"]) == 0
    assert "nothing to order" in capsys.readouterr().out


def test_plan_prints_draws_and_writes_a_page(
    profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = pytest.importorskip("matplotlib.image")
    page_file = profile.parent / "new" / "page.html"
    network = ["--bandwidth", "5gbit", "--workers", "4", "--latency", "50us"]
    assert main(["plan", str(profile), *network, "--html", str(page_file)]) == 0
    said = capsys.readouterr().out
    picture = profile.with_name("ten.profile.plan.png")
    assert str(picture) in said
    pixels = image.imread(picture)
    assert pixels.shape[1] > 1200
    colours = {tuple(pixel) for pixel in pixels[::3, ::3, :3].reshape(-1, 3).round(2).tolist()}
    assert len(colours) > 12, "the picture is all but empty"

    page = Page(page_file.read_text(encoding="utf-8"))
    assert page.pictures[0] == picture.read_bytes()
    assert not page.loads, "nothing has to be loaded"
    # The page says what the terminal says, each number of it.
    for number in re.findall(r"\d+\.\d+", said):
        assert number in page.text, number
    assert "ten<layers>" in page.text
    for words in ("as today (DDP)", "bound: no order does better", "what blocks what", "idle"):
        assert words in said
        assert words in page.text


class Page(HTMLParser):
    """Text and pictures of a page, and what it would load."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.text = ""
        self.pictures: list[bytes] = []
        self.loads: list[str] = []
        self.feed(source)

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href") and value is not None:
                head, _, data = value.partition(",")
                if head == "data:image/png;base64":
                    self.pictures.append(base64.b64decode(data))
                else:
                    self.loads.append(value)


def test_plan_with_servers_and_without_a_picture(
    profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    network = ["--bandwidth", "5gbit", "--workers", "4", "--servers", "2", "--no-png"]
    assert main(["plan", str(profile), *network]) == 0
    said = capsys.readouterr().out
    assert "2 parameter servers" in said
    assert "Recommended" not in said
    assert [p.name for p in profile.parent.iterdir()] == [profile.name]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", "4"], "--bandwidth must be given"),
        (["--bandwidth", "1gbit"], "--ranks must be given"),
        ([], "hvd-order profile -np 2"),
        (["--bandwidth", "1gbit", "--ranks", "0"], "at least 1"),
        (["--bandwidth", "1gbit", "--ranks", "1"], "nothing travels"),
    ],
)
def test_plan_says_what_is_missing(
    profile: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(profile), *options]) == 2
    assert message in capsys.readouterr().err


def test_options_that_cannot_be_read_are_named(
    profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["plan", str(profile), "--bandwidth", "10gb", "--ranks", "2"])
    assert "may mean bits or bytes" in capsys.readouterr().err


def test_a_picture_without_matplotlib_names_the_install(
    profile: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("matplotlib", "matplotlib.backends.backend_agg", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    network = ["--bandwidth", "5gbit", "--workers", "4"]
    assert main(["plan", str(profile), *network]) == 2
    said = capsys.readouterr()
    assert "as today" in said.out, "the text needs no matplotlib"
    assert "pip install 'hvd_order[report]'" in said.err


def test_a_reader_that_has_ended_is_no_error_of_the_command(profile: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as output:
        done = subprocess.run(
            [sys.executable, "-m", "hvd_order.tools.cli", "advise", str(profile),
             "--bandwidth", "5gbit", "--ranks", "4"],
            stdout=output, stderr=subprocess.PIPE, text=True, timeout=60,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "")


def test_commands_that_need_no_extension_work_where_it_is_not_built() -> None:
    program = (
        "import sys; sys.modules['hvd_order._native._core'] = None; "
        "from hvd_order.tools.cli.main import main; main(['check', '/dev/null'])"
    )
    subprocess.run([sys.executable, "-c", program], timeout=60, check=True)
