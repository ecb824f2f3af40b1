"""Jobs that share links: order inside them and between them, and what it does to their speed."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from hvd_order.base.errors import InvalidUsage
from hvd_order.cluster.links.between import orders_of
from hvd_order.cluster.links.cassini import demand_of, shifts_of, time_shifts
from hvd_order.cluster.links.circle import Demand, best_rotations, score
from hvd_order.cluster.links.crux import correction, crux_levels, crux_priorities, intensity
from hvd_order.cluster.links.fairness import shares
from hvd_order.cluster.links.jobs import LinkJob, LinkSharing, LinkTrace
from hvd_order.cluster.links.levels import compress, cut
from hvd_order.cluster.links.load import load_of
from hvd_order.cluster.links.rates import LinkContention
from hvd_order.cluster.links.shared import alone_s, simulate_shared
from hvd_order.cluster.links.step import Inside, LinkStep, LinkTransfer, step_of
from hvd_order.cluster.model.job import ClusterJob
from hvd_order.cluster.model.machines import Machines
from hvd_order.cluster.model.placement import JobPlacement
from hvd_order.cluster.model.speed import TableSpeed
from hvd_order.cluster.policies.interface import JobState
from hvd_order.planning.graph.graph import Graph, GraphOp, GraphParameter
from hvd_order.planning.graph.synthetic import chain
from hvd_order.planning.predict.simulate import (
    AllReduceScenario,
    StepWorkload,
    TransferSchedule,
    ddp,
)
from hvd_order.planning.predict.simulate import simulate as simulate_one

MIB = 2**20
ONE_LINK = [1.0]


def barrier(compute_s: float, bytes_: float) -> LinkStep:
    """Computes, then transfers, then begins again."""
    return LinkStep((compute_s,), (LinkTransfer(bytes_, 0, 0),))


def job(name: str, step: LinkStep, *links: int, workers: int = 1) -> LinkJob:
    return LinkJob(name, step, dict.fromkeys(links, 1.0), workers)


def by_priority(
    jobs: list[LinkJob], first: int, until_s: float, capacity: list[float] | None = None
) -> list[LinkTrace]:
    levels = [int(i != first) for i in range(len(jobs))]
    zeros = [0.0] * len(jobs)
    return simulate_shared(jobs, capacity or ONE_LINK, until_s, LinkSharing(levels, zeros, zeros))


# ------------------------------------------------------------------------ one link, by hand
def test_two_equal_jobs_share_a_link() -> None:
    both = [job("a", barrier(1, 1), 0), job("b", barrier(1, 1), 0)]
    for trace in simulate_shared(both, ONE_LINK, 9.5):
        # Both transfer from 1 to 3 at half the rate, then compute again.
        assert trace.starts_s == pytest.approx([0, 3, 6, 9])
        assert trace.busy_s == pytest.approx(3.5)
        assert trace.sent == [(1, 3, 0.5), (4, 6, 0.5), (7, 9, 0.5)]


def test_the_end_of_one_transfer_speeds_up_the_other() -> None:
    short, long = simulate_shared(
        [job("a", barrier(10, 1), 0), job("b", barrier(10, 3), 0)], ONE_LINK, 15
    )
    assert short.starts_s == pytest.approx([0, 12])  # 1 byte at 1/2
    assert long.starts_s == pytest.approx([0, 14])  # 1 byte at 1/2, 2 bytes at 1
    assert long.sent == [(10, 12, 0.5), (12, 14, 1.0)]


def test_an_iteration_under_way_counts_when_it_takes_long() -> None:
    # The first job sends all the time: the second half of an iteration hides the first half's.
    greedy = job("a", LinkStep((0.0, 1.0), (LinkTransfer(1, 0, 0), LinkTransfer(1, 1, 1))), 0)
    starved = job("b", barrier(0.5, 0.5), 0)
    traces = by_priority([greedy, starved], 0, 20)
    assert traces[0].iteration_s == pytest.approx(2)
    assert traces[1].starts_s == [0]
    assert traces[1].iteration_s == pytest.approx(20)


def test_a_lower_level_gets_what_is_left() -> None:
    # On link 0 the first job leaves nothing, on link 1 half.
    assert shares([{0: 1.0, 1: 0.5}, {0: 1.0}, {1: 1.0}], [0, 1, 1], [1, 1]) == [1, 0, 0.5]
    assert shares([{0: 1.0, 1: 0.5}, {0: 1.0}, {1: 1.0}], [0, 0, 0], [1, 1]) == [0.5, 0.5, 0.75]
    assert shares([{}, {0: 2.0}], [0, 0], [1]) == [float("inf"), 0.5]


def test_a_ring_is_as_fast_as_its_narrowest_link() -> None:
    ring = load_of(JobPlacement.of([(0, 2, 0), (2, 1, 0), (5, 1, 0)]))
    assert ring == pytest.approx({0: 4 / 3, 2: 4 / 3, 5: 4 / 3})
    assert shares([ring], [0], [8, 1, 4, 1, 1, 8]) == pytest.approx([3.0])
    assert load_of(JobPlacement.of([(3, 4, 0)])) == {}


def test_servers_load_the_links_that_their_traffic_crosses() -> None:
    # Machine 0: 2 workers and 1 of 2 servers; machine 1: a server; machine 2: a worker.
    load = load_of(JobPlacement.of([(0, 2, 1), (1, 0, 1), (2, 1, 0)]))
    # Up from 0: half of 2 workers' gradients, and half the parameters to the worker on 2.
    assert load == pytest.approx({0: 1.5, 1: 1.5, 2: 1.0})
    assert load_of(JobPlacement.of([(0, 2, 2)])) == {}


# ------------------------------------------------------------------------ order inside a job
def test_a_step_by_hand_under_each_order() -> None:
    # Forward 1 + 1, backward b1 2, b0 2; the link takes 3 for w0 and 4 for w1: the case of
    # test_simulate.py, with whole tensors that can be interrupted.
    graph = chain([1, 1], [2, 2], [3 * MIB, 4 * MIB])
    seconds = {
        # w1 travels 4-8 and w0 8-11.
        "buckets": 11,
        # The same, but the second layer's forward pass does not wait, as w1 is there.
        "arrival": 11,
        # w1 stops at 6 for w0, which arrives at 9, when w1 has 2 to go, until 11: f0 ends at 10.
        "ordered": 10,
    }
    for inside in ("buckets", "arrival", "ordered"):
        step = step_of(graph, inside)
        assert alone_s(step, 1 / MIB) == pytest.approx(seconds[inside]), inside


@pytest.mark.parametrize("gbit", [0.5, 1, 4])
def test_a_job_alone_takes_as_long_as_in_the_simulator_of_one_job(gbit: float) -> None:
    draw = random.Random(7)
    count = 12
    forward = [draw.uniform(1e-3, 1e-2) for _ in range(count)]
    backward = [draw.uniform(1e-3, 2e-2) for _ in range(count)]
    sizes = [draw.randrange(1, 64) * 64 * 1024 for _ in range(count)]
    work = StepWorkload.chain(
        [f"l{i}" for i in range(count)], forward, backward, [[s] for s in sizes]
    )
    seconds_per_byte = 8e-9 / gbit
    link = AllReduceScenario(0.0, seconds_per_byte, lanes=1)
    graph = chain(forward, backward, sizes)
    merged, schedule = ddp(work)
    buckets = simulate_one(merged, link, schedule, steps=8).steady_s
    assert alone_s(step_of(graph, "buckets"), seconds_per_byte) == pytest.approx(buckets)
    slice_bytes = 16 * 1024
    orders: tuple[tuple[Inside, str], ...] = (("arrival", "arrival"), ("ordered", "priority"))
    for inside, policy in orders:
        sliced = TransferSchedule(slice_bytes, slice_bytes, policy)  # type: ignore[arg-type]
        steady_s = simulate_one(work, link, sliced, steps=24).steady_s
        mine_s = alone_s(step_of(graph, inside), seconds_per_byte)
        # Slices cannot be interrupted: each op may wait for one that is under way.
        assert mine_s <= steady_s + 1e-9
        assert steady_s - mine_s <= 2 * slice_bytes * seconds_per_byte


def test_buckets_close_as_those_of_distributed_data_parallel() -> None:
    step = step_of(chain([1] * 4, [1] * 4, [30 * MIB, 20 * MIB, 10 * MIB, MIB]), "buckets")
    assert [one.size_bytes / MIB for one in step.transfers] == [1, 30, 30]
    assert {one.before for one in step.transfers} == {0}
    assert step.compute_s == 8


def test_updates_and_parameters_without_gradients_do_not_travel() -> None:
    graph = Graph(
        (GraphParameter("w", 8), GraphParameter("frozen", 8)),
        (
            GraphOp("f", 1.0, reads=("w", "frozen")),
            GraphOp("b", 1.0, ("f",), produces=("w",), phase="backward"),
            GraphOp("u", 5.0, ("b",), reads=("w",), phase="update"),
        ),
    )
    assert step_of(graph, "ordered") == LinkStep((2.0,), (LinkTransfer(8, 0, 0),))


def test_impossible_steps_and_simulations_are_refused() -> None:
    with pytest.raises(InvalidUsage, match="before <= after"):
        LinkStep((1.0, 1.0), (LinkTransfer(8, 0, 1),))
    with pytest.raises(InvalidUsage, match="at least one that takes time"):
        LinkStep((0.0,), ())
    with pytest.raises(InvalidUsage, match="one of 1 links"):
        simulate_shared([job("a", barrier(1, 1), 1)], ONE_LINK, 5)
    with pytest.raises(InvalidUsage, match="until 0"):
        simulate_shared([], ONE_LINK, 0)
    for name, known in (("crux+first", "buckets, arrival, ordered"), ("+", "fair, crux, cassini")):
        with pytest.raises(InvalidUsage, match=known):
            orders_of(name)


# ------------------------------------------------------------------------ Crux
# Examples 1 and 2 of the paper, section 4.2.
LONG, SHORT = job("1", barrier(2, 2), 0, workers=10), job("2", barrier(1, 1), 0, workers=10)


def test_crux_priority_of_example_1() -> None:
    assert intensity(LONG, ONE_LINK) == intensity(SHORT, ONE_LINK) == 10
    assert correction(SHORT.step, 1.0, LONG.step, 2.0) == pytest.approx(1.5)
    assert crux_priorities([LONG, SHORT], ONE_LINK) == pytest.approx([10, 15])
    high, low = crux_levels([LONG, SHORT], ONE_LINK, levels=2)
    assert (high, low) == (1, 0)


def test_crux_example_2() -> None:
    # Communication begins at half of the computation.
    hidden = job("1", LinkStep((2.0, 2.0), (LinkTransfer(1, 0, 0),)), 0, workers=2)
    exposed = job("2", LinkStep((1.0, 1.0), (LinkTransfer(3, 0, 0),)), 0, workers=12)
    assert intensity(hidden, ONE_LINK) == intensity(exposed, ONE_LINK)
    # Until the first job's third iteration ends.
    idle_s = [13 - by_priority([hidden, exposed], first, 13)[1].busy_s for first in (0, 1)]
    assert idle_s == pytest.approx([7, 6])


def test_a_factor_is_1_where_order_does_not_matter() -> None:
    # Transfers of 1 s in iterations of 10 s find their places.
    assert correction(barrier(9, 1), 1.0, barrier(9.5, 0.5), 0.5) == pytest.approx(1.0)


def test_priorities_are_compressed_as_in_figure_13() -> None:
    # Jobs 0 and 1 share a link, 2 and 3 another one. Two levels separate both pairs.
    edges = {(0, 1): 4.0, (2, 3): 2.0}
    levels = compress(4, edges, 2, random.Random(0))
    assert [levels[0] < levels[1], levels[2] < levels[3]] == [True, True]
    assert compress(3, {(0, 1): 1.0}, 1, random.Random(0)) == [0, 0, 0]
    with pytest.raises(InvalidUsage, match="circle"):
        compress(2, {(0, 1): 1.0, (1, 0): 1.0}, 2, random.Random(0))


def test_compression_is_close_to_brute_force() -> None:
    draw = random.Random(3)
    parts = []
    for _ in range(120):
        count, levels = draw.randint(3, 6), draw.randint(2, 3)
        order = draw.sample(range(count), count)
        value = {one: draw.uniform(1, 9) for one in order}
        edges = {(high, low): value[high] for high, low in itertools.combinations(order, 2)
                 if draw.random() < 0.5}  # fmt: skip
        best = max(
            cut(edges, list(each))
            for each in itertools.product(range(levels), repeat=count)
            if all(each[high] <= each[low] for high, low in edges)
        )
        found = compress(count, edges, levels, random.Random(0))
        assert all(found[high] <= found[low] for high, low in edges)
        assert max(found) < levels
        mine = cut(edges, found)
        assert mine <= best + 1e-9
        parts.append(mine / best if best else 1.0)
    assert min(parts) > 0.8
    assert np.mean(parts) > 0.99


# ------------------------------------------------------------------------ CASSINI
def block(length: int, busy: int) -> Demand:
    return np.array([1.0] * busy + [0.0] * (length - busy))


def test_cassini_vector() -> None:
    assert best_rotations([block(100, 60)] * 2)[0] == pytest.approx(0.8)
    assert best_rotations([block(100, 50)] * 2) == (pytest.approx(1.0), [0, 50])
    short, long = block(100, 50), block(150, 75)
    for rotation in range(150):
        assert score([short, long], [0, rotation]) == pytest.approx(0.75)


def test_many_jobs_are_turned_one_after_the_other() -> None:
    # 39 x 39 x 39 rotations are too many to try; four blocks of a quarter fit exactly.
    found, rotations = best_rotations([block(40, 10)] * 4)
    assert found == pytest.approx(1.0)
    assert sorted(r % 40 for r in rotations) == pytest.approx([0, 10, 20, 30])
    with pytest.raises(InvalidUsage, match="longer intervals"):
        score([block(997, 1), block(1009, 1)])


def test_shifts_follow_the_affinity_graph() -> None:
    # Jobs 0 and 1 share a link, 1 and 2 another: half, half, and half of the circle again.
    half = block(10, 5)
    found = time_shifts([10, 10, 10], [{0: half, 1: half}, {1: half, 2: half}])
    assert found == ([0, 5, 0], 1.0)
    assert time_shifts([10, 10], []) == ([0, 0], 1.0)


def test_a_loop_in_the_affinity_graph_is_not_taken() -> None:
    half = block(10, 5)
    triangle = [{0: half, 1: half}, {1: half, 2: half}, {2: half, 0: half}]
    assert time_shifts([10, 10, 10], triangle) is None
    jobs = [job("a", barrier(1, 1), 0, 1), job("b", barrier(1, 1), 1, 2),
            job("c", barrier(1, 1), 0, 2)]  # fmt: skip
    assert shifts_of(jobs, [1, 1, 1], 0.1) is None
    # Two jobs on the same two machines share two links, which want the same.
    assert shifts_of([job("a", barrier(1, 1), 0, 1)] * 2, [1, 1], 0.1) is not None


def test_a_demand_is_what_the_job_sends() -> None:
    demand = demand_of(job("a", barrier(0.6, 2), 0), [5.0], 0.1)
    assert demand == pytest.approx([0] * 6 + [1] * 4)
    assert demand_of(job("a", barrier(0.65, 2), 0), [5.0], 0.1) == pytest.approx(
        [0] * 6 + [0.5] + [1] * 3 + [0.5]
    )


def test_shifts_keep_transfers_apart() -> None:
    jobs = [job("a", barrier(1, 1), 0), job("b", barrier(1, 1), 0)]
    shifts = shifts_of(jobs, ONE_LINK, 0.1)
    assert shifts is not None
    assert shifts.score == pytest.approx(1.0)
    for trace in simulate_shared(jobs, ONE_LINK, 21, shifts.sharing()):
        assert trace.iteration_s == pytest.approx(2.0)
    for trace in simulate_shared(jobs, ONE_LINK, 21):
        assert trace.iteration_s == pytest.approx(3.0)


# ------------------------------------------------------------------------ the cluster simulator
GRAPH = chain([1, 1], [2, 2], [3 * MIB, 4 * MIB])
MACHINES = Machines.alike(6, {"gpu": 2}, MIB)
APART = {1: 2.0, 2: 3.0, 3: 4.0}


def state(name: str, *machines: int, graph: Graph | None = GRAPH) -> JobState:
    asked = ClusterJob(name, 0.0, 100.0, TableSpeed({1: 2.0, 2: 4.0, 3: 6.0}, APART), {"gpu": 1},
                requested=len(machines), most=3, graph=graph)  # fmt: skip
    found = JobState(asked, 0, MACHINES.amounts(asked.worker), MACHINES.amounts({}))
    found.placement = JobPlacement.of((machine, 1, 0) for machine in machines)
    return found


def rates(links: LinkContention, *states: JobState) -> dict[str, float]:
    return links({one.job.name: one for one in states})


def test_alone_on_its_links_a_job_has_its_own_speed() -> None:
    links = LinkContention(MACHINES)
    assert rates(links, state("a", 0, 1)) == {"a": 3.0}
    # One machine: no links. Different machines: not the same links.
    found = rates(links, state("a", 0, 1), state("b", 2, 3, 4), state("c", 0), state("d", 5))
    assert found == {"a": 3.0, "b": 4.0, "c": 2.0, "d": 2.0}


@pytest.mark.parametrize("simulated", [6, 1])  # 1: by the formula
@pytest.mark.parametrize("between", ["fair", "crux", "cassini"])
def test_jobs_on_the_same_links_slow_each_other_down(between: str, simulated: int) -> None:
    links = LinkContention(MACHINES, between, simulated=simulated)  # type: ignore[arg-type]
    shared = rates(links, state("a", 0, 1), state("b", 1, 2), state("c", 3, 4))
    assert shared["c"] == 3.0
    assert shared["a"] + shared["b"] < 6.0
    # A link carries no more than it can: 7 MiB an iteration, and alone 10 s an iteration.
    assert (shared["a"] + shared["b"]) / 3.0 / 10 * 7 <= 1 + 1e-9
    moved = rates(links, state("a", 0, 1), state("b", 4, 5), state("c", 3, 4))
    assert moved["a"] == 3.0
    assert moved["b"] + moved["c"] == pytest.approx(shared["a"] + shared["b"])
    assert rates(links, state("a", 0, 1)) == {"a": 3.0}  # when the other ones have left


def test_three_jobs_by_the_formula() -> None:
    links = LinkContention(MACHINES, simulated=1)
    found = rates(links, state("a", 0, 1), state("b", 1, 2), state("c", 1, 3))
    # Each gets a third of the link of machine 1: an iteration in 21 s instead of 10.
    assert found == pytest.approx(dict.fromkeys("abc", 3.0 * 10 / 21))


def test_transfers_in_buckets_make_a_job_slower() -> None:
    buckets = LinkContention(MACHINES, inside="buckets")
    assert rates(buckets, state("a", 0, 1)) == {"a": pytest.approx(3.0 * 10 / 11)}


def test_a_job_of_which_no_step_is_known_shares_nothing() -> None:
    links = LinkContention(MACHINES)
    unknown = state("a", 0, 1, graph=None)
    assert rates(links, unknown, state("b", 0, 1)) == {"a": 3.0, "b": 3.0}


def test_a_job_that_moves_has_the_links_of_its_new_machines() -> None:
    links = LinkContention(MACHINES)
    assert rates(links, state("a", 0, 1), state("b", 1, 2))["b"] < 3.0
    assert rates(links, state("a", 3, 4), state("b", 1, 2)) == {"a": 3.0, "b": 3.0}
