"""Throughput of many workers: the research's test vectors, closed forms, and what users get wrong.

Vectors V5 to V10 were computed by hand or by another program; times are in seconds, sizes in bytes.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from helpers.schemas import printed
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_order._native import _core
from hvd_order.base.errors import InvalidUsage
from hvd_order.base.link.busy_union import LinkUse
from hvd_order.planning.files.profile import Profile, Timing
from hvd_order.planning.graph.graph import Graph, GraphOp, GraphParameter
from hvd_order.planning.predict.workers.calibration import calibrate, measured_cluster
from hvd_order.planning.predict.workers.closed_forms import (
    OptimusAsync,
    OptimusSync,
    Pollux,
    mean_value_analysis,
    upper_bound,
)
from hvd_order.planning.predict.workers.comparison import compare, parse_counts
from hvd_order.planning.predict.workers.fit import fit_optimus_async, fit_pollux
from hvd_order.planning.predict.workers.server_steps import ServerSteps
from hvd_order.planning.predict.workers.throughput import (
    Cluster,
    predict_all_reduce,
    predict_servers,
    saturation,
)
from hvd_order.planning.predict.workers.transmission import TransmissionPolicy, policy
from hvd_order.planning.predict.workers.worker_step import WorkerStep, usual_slice_bytes
from hvd_order.servers.costs import Cost, ServerCosts, StrategySteps
from hvd_order.tools.cli.main import main

COMPUTE, PULL, PUSH = (
    _core.SampledKind.COMPUTE,
    _core.SampledKind.PULL,
    _core.SampledKind.PUSH,
)


def run(step: _core.SampledStep, way: TransmissionPolicy, **changed: Any) -> _core.SampledResult:
    """One worker and one server on links of one byte a second, unless something is changed."""
    workers = changed.pop("workers", 1)
    options: dict[str, Any] = {
        "slowness": [1.0] * workers, "servers": 1, "server_of": [], "worker_bytes_per_s": 1.0,
        "server_bytes_per_s": 1.0, "pull": way.native(), "push": way.native(), "sync": False,
        "pulls_are_answers": False, "step_end": _core.SampledStepEnd.PUSHED, "staleness": None,
        "delay_bound": None, "aggregates": False,
        "update_seconds_per_byte": 0.0, "update_seconds": 0.0, "update_lanes": 1,
        "program_order": False, "starts_s": [], "spread_s": 0.0, "seed": 1, "steps": 3,
        "recorded": 1,
    }  # fmt: skip
    return _core.simulate_sampled(step, **{**options, **changed})


def two_pulls(first: int, second: int) -> _core.SampledStep:
    """Two tensors that are asked for at once."""
    ops = [("a", PULL, [], 0, 0, 0), ("b", PULL, [], 0, 1, 1)]
    return _core.SampledStep(ops, [first, second], [[0.0, 0.0]])


MIB = 2**20


@pytest.mark.parametrize(
    ("sizes", "way", "ends"),
    [
        ((200_000, 100_000), policy("round_robin_cold"), (300_000, 231_070)),
        ((200_000, 100_000), policy("fifo"), (200_000, 300_000)),
        ((200_000, 100_000), policy("round_robin"), (200_000, 300_000)),
        ((10 * MIB, 6 * MIB), policy("round_robin"), (16 * MIB, 14 * MIB)),
    ],
)
def test_turns_of_one_connection(
    sizes: tuple[int, int], way: TransmissionPolicy, ends: tuple[int, int]
) -> None:
    """V5: bytes sent when each of two transfers is done."""
    assert run(two_pulls(*sizes), way).op_ends_s[0] == list(ends)


def test_a_cold_connection_warms_up() -> None:
    """65,535 bytes a turn for the first second, then 4 MiB: both tensors' rests go whole."""
    way = TransmissionPolicy("window", cold_s=1.0)
    found = run(two_pulls(200_000, 100_000), way, worker_bytes_per_s=65_535.0,
                server_bytes_per_s=65_535.0)  # fmt: skip
    # a's first turn is cold, b comes next and is as a whole a warm one.
    assert found.op_ends_s[0] == pytest.approx([300_000 / 65_535, 165_535 / 65_535])


def three_parameters(asked: tuple[int, int, int]) -> tuple[_core.SampledStep, dict[str, int]]:
    """V6: three layers; forward 2 s each, backward 1 s each, parameters of 1, 3 and 2 bytes.

    Returns:
        The step, and the place of each op.
    """
    ops: list[tuple[str, _core.SampledKind, list[int], int, int, int]] = []
    place: dict[str, int] = {}

    def add(name: str, kind: _core.SampledKind, inputs: tuple[str, ...], layer: int) -> None:
        place[name] = len(ops)
        ops.append((name, kind, [place[each] for each in inputs], 0, layer - 1, layer))

    for layer in asked:
        add(f"r{layer}", PULL, (), layer)
    for layer in (1, 2, 3):
        before = (f"f{layer - 1}",) if layer > 1 else ()
        add(f"f{layer}", COMPUTE, (f"r{layer}", *before), 1)
    for layer, before in ((3, "f3"), (2, "b3"), (1, "b2")):
        add(f"b{layer}", COMPUTE, (before,), 1)
        add(f"g{layer}", PUSH, (f"b{layer}",), layer)
    seconds = [{"f": 2.0, "b": 1.0}.get(op[0][0], 0.0) for op in ops]
    return _core.SampledStep(ops, [1, 3, 2], [seconds]), place


@pytest.mark.parametrize(
    ("asked", "way", "step_s"),
    [
        ((3, 2, 1), policy("fifo"), 19),
        ((3, 2, 1), TransmissionPolicy("window", window_bytes=2), 18),
        ((3, 2, 1), TransmissionPolicy("window", window_bytes=1), 17),
        ((3, 2, 1), policy("ordered"), 15),
        ((1, 2, 3), policy("fifo"), 15),
    ],
)
def test_a_step_by_hand(
    asked: tuple[int, int, int], way: TransmissionPolicy, step_s: float
) -> None:
    """V6: time of a step, and each step takes the same."""
    step, _ = three_parameters(asked)
    assert run(step, way).step_ends_s[0] == [step_s, 2 * step_s, 3 * step_s]


def plain_step(seconds: list[float]) -> _core.SampledStep:
    """Pull two bytes, compute, push two bytes."""
    ops = [("r", PULL, [], 0, 0, 0), ("c", COMPUTE, [0], 0, 0, 0), ("g", PUSH, [1], 0, 0, 0)]
    return _core.SampledStep(ops, [2], [[0.0, each, 0.0] for each in seconds])


def rate(found: _core.SampledResult, after: int = 20) -> float:
    """Steps/s of all workers, after their first steps."""
    begin = max(each[after] for each in found.step_ends_s)
    end = min(each[-1] for each in found.step_ends_s)
    return sum(begin < at <= end for each in found.step_ends_s for at in each) / (end - begin)


@pytest.mark.parametrize(
    ("workers", "starts", "sharing", "expected"),
    [
        (1, [0], "fair", 1 / 8),
        (2, [0, 0], "fair", 2 / 12),
        (2, [0, 1], "fair", 2 / 10),
        (2, [0, 2], "fair", 2 / 8),
        (2, [0, 0], "fifo", 2 / 8),
        (4, [0, 0, 0, 0], "fifo", 1 / 2),
    ],
)
def test_workers_of_one_speed_by_hand(
    workers: int, starts: list[float], sharing: Any, expected: float
) -> None:
    """V7: constant durations lock step, so the start decides; the truth is 0.222 for two."""
    way = TransmissionPolicy(sharing=sharing)
    found = run(plain_step([4.0]), way, workers=workers, starts_s=starts, steps=120)
    assert rate(found) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    ("way", "together", "apart"),
    [
        (policy("fifo"), 0.0645, 2 / 19),
        (TransmissionPolicy("window", window_bytes=1), 0.069, 2 / 17),
        (policy("ordered"), 0.074, 2 / 15),
    ],
)
def test_two_workers_on_the_step_by_hand(
    way: TransmissionPolicy, together: float, apart: float
) -> None:
    """V8: begun together, and begun 7 s apart, so that phases never meet."""
    step, _ = three_parameters((3, 2, 1))
    both = run(step, way, workers=2, starts_s=[0.0, 0.0], steps=200)
    assert rate(both) == pytest.approx(together, rel=0.03)
    later = run(step, way, workers=2, starts_s=[0.0, 7.0], steps=200)
    assert rate(later) == pytest.approx(apart, rel=0.03)


def varied_step(count: int = 4000) -> _core.SampledStep:
    """The plain step with computations that vary as much as those of the analysis."""
    draw = random.Random(5)
    return plain_step([draw.expovariate(1 / 4) for _ in range(count)])


def test_mean_value_analysis_by_hand() -> None:
    """V9: a closed network of a computation of 4 s and two links of 2 s."""
    expected = {1: 0.125, 2: 0.2222, 3: 0.2935, 4: 0.3433, 6: 0.4005, 8: 0.4286}
    found = mean_value_analysis(4.0, (2.0, 2.0), 8)
    for workers, steps_per_s in expected.items():
        assert found[workers - 1] == pytest.approx(steps_per_s, abs=5e-5)
        assert found[workers - 1] <= upper_bound(4.0, (2.0, 2.0), workers) + 1e-12


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_varied_steps_agree_with_mean_value_analysis(workers: int) -> None:
    """Within 2 %, as the analysis is exact for this network."""
    exact = mean_value_analysis(4.0, (2.0, 2.0), workers)[-1]
    found = run(varied_step(), policy("fifo"), workers=workers, spread_s=8.0, steps=4000)
    assert rate(found) == pytest.approx(exact, rel=0.02)


def test_synchronous_workers_wait_for_the_slowest() -> None:
    """Pushes of a step are applied together, so all workers take the slow one's time."""
    sync = {"sync": True, "step_end": _core.SampledStepEnd.UPDATED, "steps": 5}
    found = run(plain_step([4.0]), policy("fifo"), slowness=[1.0, 2.0], **sync)
    fast, slow = found.step_ends_s
    assert fast[:5] == slow[:5] == [14.0, 28.0, 42.0, 56.0, 70.0]


def test_a_worker_is_never_farther_ahead_than_the_staleness_allows() -> None:
    """A worker ten times as fast waits: it is at most 2 steps ahead when it pulls."""
    found = run(plain_step([4.0]), policy("fifo"), slowness=[0.1, 1.0], staleness=2, steps=20)
    fast, slow = found.step_ends_s
    for number in range(4, 20):  # its pull for this step came after the slow one's push
        assert fast[number] > slow[number - 3]
    free = run(plain_step([4.0]), policy("fifo"), slowness=[0.1, 1.0], steps=20)
    assert len(free.step_ends_s[0]) > len(fast) + 5


def test_an_update_and_the_ends_of_a_connection_take_their_time() -> None:
    """2 s to pull, 1 s to parse, 4 s, 2 s to push, 1 s to parse, 3 s to apply."""
    way = TransmissionPolicy(receive_s=1.0)
    ended = _core.SampledStepEnd.UPDATED
    found = run(plain_step([4.0]), way, update_seconds=3.0, step_end=ended)
    assert found.step_ends_s[0] == [13.0, 26.0, 39.0]
    assert found.update_busy_s == [9.0]


@pytest.mark.parametrize(
    ("tensors", "update_s", "latency_s", "step_s"),
    [
        (1, 0.0, 0.0, 2 + 2 + 2),  # the server's link is shared by two: 2 s each way
        (1, 0.5, 0.25, 2 + 2.25 + 0.5 + 2.25),
        # The second tensor has come at 6; the server is at work on the first until 7.
        (2, 3.0, 0.0, 2 + 2 + 3 + 3 + 2),
    ],
)
def test_a_step_with_servers_by_hand(
    tensors: int, update_s: float, latency_s: float, step_s: float
) -> None:
    names = tuple("ab"[:tensors])
    graph = Graph(
        tuple(GraphParameter(name, 64) for name in names),
        (
            GraphOp("forth", 1.0, reads=names),
            GraphOp("back", 1.0, ("forth",), produces=names, phase="backward"),
        ),
    )
    way = replace(policy("ordered"), latency_s=latency_s)
    cluster = Cluster(64.0, pull=way, push=way, update_s=update_s)
    steps = ServerSteps(WorkerStep(graph, [[1.0, 1.0]]), cluster, 2, 1, 8)
    assert steps.steady_s == pytest.approx(step_s)
    times = steps.times()
    begin_s = times.begin_s
    assert times.end_s - begin_s == pytest.approx(step_s)
    # The next step has begun when this one's computation ended, and waits.
    forth, back = times.ops
    assert (forth.could_start_s, back.end_s) == pytest.approx((begin_s, times.end_s))
    assert forth.wait_s == pytest.approx(step_s - 2)
    last = times.before[-1]
    assert (last.ready_s, last.finished_s) == pytest.approx((begin_s, forth.start_s))
    up, down = times.links["worker 0 up"][-1], times.links["worker 0 down"][-1]
    assert up[1] - up[0] == pytest.approx(2 * tensors)
    assert down[1] - down[0] == pytest.approx(2)


def test_answers_overlap_the_next_step() -> None:
    """hvd_order's servers send what they applied; the next step begins at once and waits for it."""
    found = run(plain_step([4.0]), policy("fifo"), pulls_are_answers=True,
                step_end=_core.SampledStepEnd.COMPUTED)  # fmt: skip
    assert found.step_ends_s[0] == [4.0, 12.0, 20.0]  # the first parameters are there


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 5), st.integers(1, 3), st.sampled_from(["whole", "window", "priority"]),
    st.sampled_from(["fair", "fifo"]), st.booleans(), st.integers(0, 2**32),
)  # fmt: skip
def test_no_link_carries_more_than_it_can(
    workers: int, servers: int, turns: Any, sharing: Any, sync: bool, seed: int
) -> None:
    """Bytes of the steps that ended need their time on the servers' links; equal seeds agree."""
    draw = random.Random(seed)
    step, _ = three_parameters((3, 2, 1))
    way = TransmissionPolicy(turns, window_bytes=1.5, sharing=sharing)
    options: dict[str, Any] = {
        "workers": workers, "servers": servers, "sync": sync, "seed": seed, "steps": 8,
        "spread_s": 10 * draw.random(), "server_of": [draw.randrange(servers) for _ in range(3)],
        "step_end": _core.SampledStepEnd.UPDATED,
    }  # fmt: skip
    found = run(step, way, **options)
    again = run(step, way, **options)
    assert found.step_ends_s == again.step_ends_s
    loads = [0.0] * servers
    for size, server in zip([1, 3, 2], options["server_of"], strict=True):
        loads[server] += size
    ended = sum(len(each) for each in found.step_ends_s)
    for load, pulled, pushed in zip(loads, found.pull_busy_s, found.push_busy_s, strict=True):
        assert pulled >= ended * load - 1e-6
        assert pushed >= ended * load - 1e-6
        assert max(pulled, pushed) <= found.end_s + 1e-6


# ---- the formulas ----


def test_speed_formulas_by_hand() -> None:
    """V10."""
    assert OptimusAsync(1, 0.5, 0.1, 0.05).steps_per_s(4, 2) == pytest.approx(1.6)
    sync = OptimusSync(0.01, 0.2, 0.1, 0.02, 0.01).steps_per_s(4, 2, 64)
    assert sync == pytest.approx(1.51515, abs=1e-5)
    pollux = Pollux(0.02, 0.002, 0.05, 0.004, 2).step_s(32, 4, 2)
    assert pollux == pytest.approx(0.102078, abs=1e-6)


def test_fits_find_what_made_the_data() -> None:
    """Exact data of a formula give the formula back."""
    true = OptimusAsync(1.0, 0.5, 0.1, 0.05)
    data = [(w, p, true.steps_per_s(w, p)) for w in (1, 2, 3, 6) for p in (1, 2)]
    fitted = fit_optimus_async(data)
    assert fitted.steps_per_s(20, 4) == pytest.approx(true.steps_per_s(20, 4), rel=1e-3)
    model = Pollux(0.02, 0.002, 0.05, 0.004, 2)
    cells = [(b, w, w, model.step_s(b, w, w)) for b in (16.0, 32.0, 64.0) for w in (1, 2, 3, 4)]
    found = fit_pollux(cells)
    assert found.step_s(32, 12, 12) == pytest.approx(model.step_s(32, 12, 12), rel=1e-2)


# ---- from a profile ----


def profile(runs: int = 20, seconds: float = 4e-3, spread: float = 0.2) -> Profile:
    """Two layers of 1 MB each, with durations that vary."""
    draw = random.Random(2)
    parameters = (GraphParameter("first", 10**6), GraphParameter("second", 10**6))
    ops = (
        GraphOp("f1", seconds, (), ("first",), ()),
        GraphOp("f2", seconds, ("f1",), ("second",), ()),
        GraphOp("b2", seconds, ("f2",), (), ("second",), phase="backward"),
        GraphOp("b1", seconds, ("b2",), (), ("first",), phase="backward"),
    )
    timings = {
        op.name: Timing.of([seconds * (1 + spread * draw.random()) for _ in range(runs)])
        for op in ops
    }
    return Profile("two layers", {}, parameters, ops, timings)


def test_more_workers_bring_more_until_the_link_is_full() -> None:
    """Monotone up to noise, below the hard bound of the link, and two servers carry more."""
    step = WorkerStep.from_profile(profile())
    cluster = Cluster(1e9)
    found = [predict_servers(step, cluster, n, 1) for n in (1, 2, 4, 8, 16)]
    rates = [each.steps_per_s for each in found]
    assert rates[0] < rates[1] < rates[2]
    assert all(each.steps_per_s <= 1e9 / 2e6 * 1.05 for each in found)
    assert saturation(found).workers == 16 or rates[-1] > 0.9 * 1e9 / 2e6
    assert predict_servers(step, cluster, 64, 2).steps_per_s > 1.5 * rates[-1] or rates[-1] < 450
    assert found[0].low <= found[0].steps_per_s <= found[0].high


def test_all_reduce_loses_to_variation() -> None:
    """One worker runs at its own pace; of many, each step is as long as the slowest one's."""
    mine = profile(spread=1.0)
    graph, step = mine.graph("median"), WorkerStep.from_profile(mine)
    alone = predict_all_reduce(graph, step.compute_s, 1, 1e12)
    many = predict_all_reduce(graph, step.compute_s, 16, 1e12)
    assert alone.steps_per_s == pytest.approx(len(step.compute_s) / sum(step.compute_s), rel=0.1)
    assert 0.6 * 16 < many.steps_per_s / alone.steps_per_s < 0.99 * 16


def test_all_reduce_counts_the_update() -> None:
    """It takes its time, and the rest of the step takes no less for it."""
    mine = profile()
    graph, step = mine.graph("median"), WorkerStep.from_profile(mine)
    update = GraphOp("update", 5e-3, ("b1",), (), (), phase="update")
    longer = Graph(graph.parameters, (*graph.ops, update))
    alone, updated = (predict_all_reduce(g, step.compute_s, 1, 1e12) for g in (graph, longer))
    mean_s = sum(step.compute_s) / len(step.compute_s)
    assert 1 / updated.steps_per_s - 1 / alone.steps_per_s == pytest.approx(
        5e-3 * mean_s / graph.compute_s, rel=0.1
    )


def test_the_table_has_a_row_for_each_number() -> None:
    """Predictions, and the closed forms that apply."""
    mine = profile()
    step = WorkerStep.from_profile(mine)
    graph = mine.graph("median")
    rows = compare(step, graph, Cluster(1e8), [1, 2, 4], [1, 2], "async", seeds=2)
    assert [(r.found.servers, r.found.workers) for r in rows] == [
        (1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4)
    ]  # fmt: skip
    assert all(r.mean_value is not None and r.bound is not None and r.fitted for r in rows)
    reduced = compare(step, graph, Cluster(1e8), [1, 2, 4], [1], "allreduce", seeds=2)
    assert [r.mean_value for r in reduced] == [None] * 3


def test_slices_may_depend_on_the_number_of_workers() -> None:
    mine = profile()
    step, graph = WorkerStep.from_profile(mine), mine.graph("median")
    asked: list[int] = []

    def slices(workers: int) -> int:
        asked.append(workers)
        return 64 * 1024 if workers == 4 else 256 * 1024

    found = compare(step, graph, Cluster(1e8), [2, 4], [1], "sync", seeds=2, slices=slices)
    assert asked == [2, 4]
    for row, slice_bytes in zip(found, (256 * 1024, 64 * 1024), strict=True):
        cut = WorkerStep.from_profile(mine, slice_bytes=slice_bytes)
        assert row.found == predict_servers(cut, Cluster(1e8), row.found.workers, 1, "sync", 2)


def test_the_slices_of_synchronous_workers_shrink_with_their_number() -> None:
    parameters = [GraphParameter("weight", 100 * 2**20)]
    sizes = [usual_slice_bytes(parameters, 1e8, 1e-4, workers) for workers in (1, 4, 8)]
    assert sizes[0] > sizes[1] == 2 * sizes[2]


@pytest.mark.parametrize(
    ("text", "expected"), [("1,2,4", [1, 2, 4]), ("3", [3]), ("2-5", [2, 3, 4, 5])]
)
def test_counts(text: str, expected: list[int]) -> None:
    assert parse_counts(text, "--workers") == expected


def test_a_long_range_is_thinned_out() -> None:
    """Both ends are there, and at most 16 numbers."""
    found = parse_counts("1-1000", "--workers")
    assert found[0] == 1
    assert found[-1] == 1000
    assert len(found) <= 16


@pytest.mark.parametrize("text", ["0", "4-2", "x", "1-", "", "-3"])
def test_counts_that_are_none(text: str) -> None:
    with pytest.raises(InvalidUsage, match="--servers is"):
        parse_counts(text, "--servers")


def test_impossible_jobs_are_refused() -> None:
    """One clear error each."""
    step = WorkerStep.from_profile(profile())
    with pytest.raises(InvalidUsage, match="0 servers; at least 1"):
        predict_servers(step, Cluster(1e9), 2, 0)
    with pytest.raises(InvalidUsage, match="0 workers; at least 1"):
        predict_servers(step, Cluster(1e9), 0, 1)
    for staleness, mode in ((-1, "async"), (2, "sync")):
        with pytest.raises(InvalidUsage, match="a staleness of"):
            predict_servers(step, Cluster(1e9, staleness=staleness), 2, 1, mode)  # type: ignore[arg-type]
    with pytest.raises(InvalidUsage, match="3 steps of each worker; at least 10"):
        predict_servers(step, Cluster(1e9), 2, 1, steps=3)
    with pytest.raises(InvalidUsage, match="a bandwidth of 0"):
        predict_servers(step, Cluster(0.0), 2, 1)
    with pytest.raises(InvalidUsage, match=r"all measured steps .* the same time"):
        WorkerStep.from_profile(profile(spread=0.0))
    with pytest.raises(InvalidUsage, match="no transmission is called 'http3'"):
        policy("http3")
    bare = profile()
    timings = {name: Timing(5, 1e-3, 2e-3, 1e-4) for name in bare.timings}
    with pytest.raises(InvalidUsage, match="no durations of single steps"):
        WorkerStep.from_profile(Profile("p", {}, bare.parameters, bare.ops, timings))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--mode", "allreduce", "--servers", "2"], "--servers is for parameter servers"),
        (["--mode", "sync", "--staleness", "1"], "a staleness of 1 steps, sync"),
        (["--transmission", "fifo", "--order", "tic"], "--order has no effect"),
        (["--mode", "sync", "--delay-bound", "1"], "a delay bound of 1 updates, sync"),
        (["--delay-bound", "-1"], "a delay bound of -1 updates"),
        (["--mode", "allreduce", "--delay-bound", "1"], "--delay-bound is for parameter servers"),
        (["--system", "tensorflow", "--delay-bound", "1"], "--delay-bound is for hvd_order's"),
        (["--aggregate"], "--aggregate needs --delay-bound"),
        (["--servers", "0"], "--servers is '0'"),
        (["--batch", "0"], "--batch is 0"),
    ],
)
def test_options_without_effect_are_refused(
    options: list[str], says: str, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command ends with 2 and one line, and nothing else."""
    profile().write(tmp_path / "p.json")
    command = ["predict", str(tmp_path / "p.json"), "--bandwidth", "1gbit", "--workers", "1,2"]
    assert main([*command, *options]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert says in shown.err


def test_the_command_prints_a_table_and_writes_a_page(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    profile().write(tmp_path / "p.json")
    page = tmp_path / "page.html"
    options = ["--bandwidth", "1gbit", "--workers", "1,2", "--mode", "async"]
    more = ["--price", "2", "--html", str(page)]
    assert main(["predict", str(tmp_path / "p.json"), *options, *more]) == 0
    shown = capsys.readouterr().out
    assert "two layers: predicted throughput" in shown
    (row,) = [line for line in shown.splitlines() if line.startswith("1, 2")]
    rate, price = float(row.split()[2]), float(row.split()[-1])
    # A server and two workers for 2 an hour, for as long as a million steps take.
    assert price == pytest.approx(2 * 3 * 1e6 / rate / 3600, rel=0.01)
    assert "throughput by workers" in page.read_text("utf-8")
    rows = printed(capsys, 0, "predict", tmp_path / "p.json", *options)["throughput"]
    assert rows[1]["steps_per_s"] == pytest.approx(rate, rel=0.01)
    for chosen, mode in (
        ([], "allreduce"), (["--servers", "2"], "sync"), (["--staleness", "1"], "async"),
        (["--system", "tensorflow"], "async"),
    ):  # fmt: skip
        (row,) = printed(
            capsys, 0, "predict", tmp_path / "p.json", "--workers", "2", *options[:2], *chosen
        )["throughput"]  # fmt: skip
        assert row["mode"] == mode


def measured(rate: float | None = 5e8, at_least: bool = False) -> Profile:
    """The profile above with servers: slow updates, and workers' ends that copy 1 GB/s."""
    use = LinkUse(100, 10**8, 0.2, rate, at_least)
    cost = Cost(0.0, 0.0, apart=True)
    costs = ServerCosts(
        1, 1, "async", "server", use, use, Cost(1e-3, 2e-8, apart=True), cost,
        Cost(0.0, 1e-9, apart=False),
    )  # fmt: skip
    return replace(profile(), servers=costs)


def predicted(
    mine: Profile, folder: Any, capsys: pytest.CaptureFixture[str], *options: str
) -> tuple[int, str, str]:
    mine.write(folder / "p.json")
    code = main(["predict", str(folder / "p.json"), "--workers", "2", "--seeds", "2", *options])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_what_was_measured_stands_in_for_options(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same steps/s as with the same numbers as options, and a sentence that says which."""

    def rate(text: str) -> str:
        (row,) = [line for line in text.splitlines() if line.startswith("1, 2")]
        return row.split()[2]

    code, out, _ = predicted(measured(), tmp_path, capsys)
    assert code == 0
    assert "links of 4 Gbit/s" in out
    assert "From the profile, measured with 1 server, 1 worker, async: the links, updates (" in out
    assert "As given" not in out
    given = ["--bandwidth", "0.5GB/s", "--copy-rate", "1GB/s"]
    _, half, _ = predicted(measured(), tmp_path, capsys, *given)
    assert "async: updates (50 MB/s and 1 ms a slice)." in half
    assert "cannot be told apart" not in half
    assert out.count("cannot be told apart") == 1, "the workers' ends"
    assert "As given: --bandwidth, --copy-rate." in half
    _, bare, _ = predicted(profile(), tmp_path, capsys, *given, "--mode", "async")
    assert "No time is counted for updates: neither measured nor given." in bare
    assert float(rate(bare)) > 1.5 * float(rate(out)), "updates of 42 ms a step were counted"
    _, fast, _ = predicted(measured(), tmp_path, capsys, *given, "--update-rate", "1000GB/s")
    assert float(rate(fast)) == pytest.approx(float(rate(bare)), rel=0.01)


@pytest.mark.parametrize(
    ("mine", "options", "code", "says"),
    [
        (measured(at_least=True), [], 0, "links of at least 4 Gbit/s"),
        (measured(), ["--mode", "allreduce"], 0, "1 worker, async: the links."),
        (measured(), ["--system", "tensorflow"], 0,
         "of hvd_order's servers, not of TensorFlow's"),
        (measured(None), [], 2, "the recorded slices are too small to time; give --bandwidth"),
        (profile(), [], 2, "has no link to servers, so --bandwidth must be given"),
    ],
)  # fmt: skip
def test_what_was_not_measured_is_said(
    mine: Profile, options: list[str], code: int, says: str, tmp_path: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    ended, out, err = predicted(mine, tmp_path, capsys, *options)
    assert ended == code
    assert says in " ".join((out + err).split())
    assert out == "" or code == 0


def test_the_profiled_job_is_reproduced() -> None:
    """What each parameter costs beside computation is found again from the job's steps alone."""
    mine = measured()
    assert mine.servers is not None
    step = WorkerStep.from_profile(mine, slice_bytes=100_000)
    cluster = measured_cluster(mine.servers, 1e-4)
    assert cluster is not None
    real = predict_servers(step.with_exchange_time(2e-3), cluster, 1, 1)
    costs = replace(mine.servers, step_s=(1 / real.steps_per_s,) * 3)
    found = calibrate(step, costs, 1e-4)
    assert found is not None
    assert found.exchange_s == pytest.approx(2e-3, rel=0.1)
    assert found.simulated_s < found.measured_s
    again = predict_servers(found.step, cluster, 1, 1).steps_per_s
    assert again == pytest.approx(real.steps_per_s, rel=0.02)
    assert found.step.compute_s[0] == pytest.approx(
        step.compute_s[0] + step.parameters * found.exchange_s
    )


def test_a_job_that_was_faster_than_simulated_changes_nothing(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor does a file without the job's steps, or without its link."""
    mine = measured()
    assert mine.servers is not None
    step = WorkerStep.from_profile(mine)
    fast = replace(mine.servers, step_s=(1e-6,) * 3)
    found = calibrate(step, fast, 1e-4)
    assert found is not None
    assert found.step is step
    assert calibrate(step, mine.servers, 1e-4) is None
    unknown = measured(None)
    assert unknown.servers is not None
    assert calibrate(step, replace(unknown.servers, step_s=(1.0,) * 3), 1e-4) is None
    _, out, _ = predicted(replace(mine, servers=fast), tmp_path, capsys)
    assert "took 1 us, not more than simulated" in out
    slow = replace(mine.servers, step_s=(1.0,) * 3)
    _, out, _ = predicted(replace(mine, servers=slow), tmp_path, capsys)
    assert "A step of the profiled job took 1 s, simulated" in out
    assert "more for each parameter" in out


def test_slices_hold_several_parameters_or_a_part_of_one() -> None:
    graph = Graph(
        (GraphParameter("a", 1000), GraphParameter("b", 3000), GraphParameter("c", 20_000)),
        (
            GraphOp("f", 1.0, (), ("a", "b"), ()),
            GraphOp("g", 1.0, ("f",), ("c",), ()),
            GraphOp("h", 1.0, ("g",), (), ("a", "b", "c"), phase="backward"),
        ),
    )
    rows = [[1.0, 1.0, 1.0], [1.1, 1.0, 1.0]]
    whole = WorkerStep(graph, rows)
    assert whole.tensor_bytes == [1000, 3000, 20_000]
    sliced = WorkerStep(graph, rows, slice_bytes=8192)
    assert len(sliced.tensor_bytes) < 3 + 3, "a and b travel together"
    assert max(sliced.tensor_bytes) <= 8192
    assert sum(sliced.tensor_bytes) == pytest.approx(24_000, abs=48)
    assert sliced.parameters == whole.parameters == 3
    with pytest.raises(InvalidUsage, match="slice size is 8 bytes"):
        WorkerStep(graph, rows, slice_bytes=8)


def of_strategy(between_s: float = 1e-3, first: str = "first") -> Profile:
    """The profile with TensorFlow's servers in place of ours."""
    mine = measured()
    assert mine.servers is not None
    order = (0, 1) if first == "first" else (1, 0)
    steps = StrategySteps(20 * (order,), between_s)
    return replace(mine, servers=replace(mine.servers, strategy=steps))


def test_a_profile_of_tensorflows_servers_tells_their_costs(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--bandwidth", "0.5GB/s", "--system", "tensorflow"]

    def rate(mine: Profile) -> float:
        code, out, _ = predicted(mine, tmp_path, capsys, *given)
        assert code == 0
        (row,) = [line for line in out.splitlines() if line.startswith("1, 2")]
        return float(row.split()[2])

    _, out, _ = predicted(of_strategy(), tmp_path, capsys, *given)
    said = " ".join(out.split())
    assert (
        "async: updates (50 MB/s and 1 ms a slice), the orders in which parameters come, " in said
    )
    assert "1 ms between two steps." in said
    assert "No time is counted for both ends of a connection: neither measured" in said
    assert rate(of_strategy()) > 1.15 * rate(of_strategy(between_s=0.04))
    assert rate(profile()) > 1.2 * rate(of_strategy()), "updates of 42 ms a step were counted"
    _, ours, _ = predicted(of_strategy(), tmp_path, capsys, "--bandwidth", "0.5GB/s")
    assert "of TensorFlow's servers, not of hvd_order's" in " ".join(ours.split())


def test_what_comes_first_matters() -> None:
    """A first layer that comes last begins when all has come."""
    slow = Cluster(1e8, pulls="request", step_end="updated", pull=policy("fifo"))
    found = [
        predict_servers(
            WorkerStep.from_profile(profile(), fetch_orders=orders), slow, 1, 1
        ).steps_per_s
        for orders in (20 * [(0, 1)], 20 * [(1, 0)], 10 * [(0, 1), (1, 0)])
    ]
    # Transfers of 10 ms, four layers of 4.4 ms: 10 + 4 x 4.4 + 10, and 10 more at most.
    assert 1 / found[1] - 1 / found[0] == pytest.approx(4.4e-3, rel=0.1)
    # An order belongs to its measured step: of steps that change it, half take longer.
    assert 1 / found[2] - 1 / found[0] == pytest.approx(2.2e-3, rel=0.25)


def test_orders_of_fetches_that_do_not_fit_the_steps_are_refused() -> None:
    with pytest.raises(InvalidUsage, match="3 orders of pulls for 20 measured steps"):
        WorkerStep.from_profile(profile(), fetch_orders=3 * [(0, 1)])
    pulls = [("a", _core.SampledKind.PULL, [], 0, 0, 0), ("b", _core.SampledKind.PULL, [], 0, 1, 1)]
    for order in ([1], [0, 0], [0, 2]):
        with pytest.raises(InvalidUsage, match="is not one of the 2 pulls without inputs"):
            _core.SampledStep(pulls, [1, 1], [[0.0, 0.0]], [order])


def test_variables_go_to_servers_in_turn() -> None:
    """In the order of the parameters, not of their readers."""
    ops = (GraphOp("f", 1.0, (), ("b", "a", "c")), GraphOp("g", 1.0, ("f",), (), ("a", "b", "c")))
    graph = Graph((GraphParameter("a", 1), GraphParameter("b", 9), GraphParameter("c", 5)), ops)
    step = WorkerStep(graph, [[1.0, 1.0]])
    assert step.tensor_bytes == [1, 9, 5]
    assert step.on_servers(2, "in_turn") == [0, 1, 0]
    assert step.on_servers(2) == [1, 0, 1]


def test_the_report_says_what_a_delay_bound_drops(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--bandwidth", "0.02gbit", "--servers", "2"]
    eight = ["--workers", "8", *options]
    code, out, _ = predicted(profile(), tmp_path, capsys, *eight, "--delay-bound", "1")
    assert code == 0
    assert "were not sent" in out
    code, out, _ = predicted(
        profile(), tmp_path, capsys, *eight, "--delay-bound", "100", "--aggregate"
    )
    assert code == 0
    assert "were added up by helpers" in out
    _, out, _ = predicted(profile(), tmp_path, capsys, *eight)
    assert "added up" not in out


def test_an_order_changes_what_a_step_takes() -> None:
    """With an enforced order, the parameter that is needed first comes first."""
    graph = Graph(
        (GraphParameter("a", 1000), GraphParameter("b", 9000)),
        (
            GraphOp("f", 5.0, (), ("a",), ()),
            GraphOp("g", 5.0, ("f",), ("b",), ()),
            GraphOp("h", 0.0, ("g",), (), ("a", "b"), phase="backward"),
        ),
    )
    steps = [[5.0, 5.0, 0.0], [5.1, 5.0, 0.0]]
    cluster = Cluster(1000.0, pulls="request", step_end="updated")
    good = predict_servers(WorkerStep(graph, steps), cluster, 1, 1, seeds=2)
    bad = predict_servers(
        WorkerStep(graph, steps, priorities={"a": 1, "b": 0}), cluster, 1, 1, seeds=2
    )
    assert good.steps_per_s > 1.1 * bad.steps_per_s
