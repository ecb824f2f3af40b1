"""E and S: the formulas by hand, and the shapes that the paper found with them."""

from __future__ import annotations

import random
import statistics

import pytest

from hvd_order.base.errors import InvalidUsage
from hvd_order.base.link.link_model import LinkModel
from hvd_order.planning.bounds.pull_bound import pull_bound
from hvd_order.planning.graph import synthetic
from hvd_order.planning.graph.graph import Graph, Op
from hvd_order.planning.orders.tac import tac
from hvd_order.planning.steps.efficiency import Overlap, Span, busy_s, overlap_of
from hvd_order.planning.steps.execution import execute, pull_order, pull_overlap

TRANSFER_S = 1.0
LINK = LinkModel(0.0, 0.0, TRANSFER_S / (2 * 2**20))  # the toy models' variables take a second each


# ------------------------------------------------------------------------- by hand


def test_a_step_by_hand() -> None:
    # link      aaaa bbbb
    # compute       xx   yy       U = 8 + 4, L = 8, m = 10
    spans = [
        Span("link", "a", 5.0, 9.0),
        Span("link", "b", 9.0, 13.0),
        Span("compute", "x", 9.0, 11.0),
        Span("compute", "y", 13.0, 15.0),
    ]
    overlap = overlap_of(spans)
    assert overlap == Overlap(step_s=10.0, serial_s=12.0, busiest_s=8.0)
    assert overlap.efficiency == 0.5
    assert overlap.speedup == 0.5
    assert overlap.part_of_possible(10.0) == 1.0  # y needs b: there is nothing better
    assert overlap.part_of_possible(9.0) == pytest.approx(2 / 3)


def test_three_resources() -> None:
    spans = [Span("gpu", "x", 0, 4), Span("down", "a", 0, 3), Span("up", "b", 1, 3)]
    assert overlap_of(spans) == Overlap(4, 9, 4)
    assert overlap_of(spans).speedup == 5 / 4


def test_what_is_recorded_twice_counts_once() -> None:
    assert busy_s([]) == 0.0
    assert busy_s([(0, 2), (1, 3), (1, 2), (5, 6)]) == 4
    assert busy_s([(0, 9), (1, 2), (3, 4)]) == 9
    # Transfers are often recorded from their request on: they overlap, and the link is busy once.
    spans = [Span("link", "a", 0, 4), Span("link", "b", 0, 8), Span("compute", "x", 4, 12)]
    assert overlap_of(spans) == Overlap(12, 16, 8)


def test_in_the_steady_state_the_step_is_given() -> None:
    spans = [Span("link", "a", 1, 5), Span("compute", "x", 0, 4)]
    assert overlap_of(spans).efficiency == pytest.approx(0.75)
    assert overlap_of(spans, step_s=4.0).efficiency == 1.0


def test_lost_time_makes_the_efficiency_negative() -> None:
    assert Overlap(step_s=12.0, serial_s=10.0, busiest_s=6.0).efficiency == -0.5


def test_one_resource_has_nothing_to_overlap() -> None:
    overlap = overlap_of([Span("compute", "x", 0, 4)])
    assert overlap.efficiency is None
    assert overlap.speedup == 0.0
    assert Overlap(0.0, 0.0, 0.0).speedup == 0.0
    assert Overlap(3.0, 3.0, 2.0).part_of_possible(3.0) is None


def test_spans_that_make_no_sense_are_named() -> None:
    with pytest.raises(InvalidUsage, match="'x' on compute begins at 2 s and ends at 1 s"):
        overlap_of([Span("compute", "x", 2, 1)])
    with pytest.raises(InvalidUsage, match="'x' on compute"):
        overlap_of([Span("compute", "x", float("nan"), 1)])
    with pytest.raises(InvalidUsage, match="without spans"):
        overlap_of([])


# ------------------------------------------------------------------------- the paper's shapes


def efficiencies(graph: Graph, orders: list[list[int]]) -> list[float]:
    found = [pull_overlap(graph, order, LINK).efficiency for order in orders]
    return [e for e in found if e is not None]


def random_orders(count: int, of: int) -> list[list[int]]:
    pick = random.Random(0)
    return [pick.sample(range(of), of) for _ in range(count)]


def test_order_matters_for_layers_in_a_row() -> None:
    graph = synthetic.sequential(op_s=TRANSFER_S)
    forward, reverse = list(range(32)), list(reversed(range(32)))
    assert efficiencies(graph, [forward, reverse]) == pytest.approx([31 / 32, 0.0])
    found = efficiencies(graph, random_orders(100, of=32))
    assert max(found) < 0.5
    assert statistics.pstdev(found) > 0.05


def test_order_does_not_matter_for_one_layer() -> None:
    graph = synthetic.parallel(op_s=TRANSFER_S)
    assert efficiencies(graph, random_orders(100, of=32)) == pytest.approx([31 / 32] * 100)


def test_the_gain_peaks_where_communication_equals_computation() -> None:
    """And vanishes at both ends, as figure 10 has it: no order hides what is not there."""
    gains, limits = {}, {}
    ratios = (0.02, 0.1, 0.3, 1.0, 3.0, 10.0, 50.0)  # of communication to computation
    for ratio in ratios:
        graph = synthetic.sequential(op_s=TRANSFER_S / ratio)
        ordered = pull_overlap(graph, list(range(32)), LINK)
        mean_s = statistics.mean(
            pull_overlap(graph, order, LINK).step_s for order in random_orders(50, of=32)
        )
        gains[ratio] = mean_s / ordered.step_s - 1
        limits[ratio] = ordered.speedup
    assert max(gains, key=gains.__getitem__) == max(limits, key=limits.__getitem__) == 1.0
    for values in (gains, limits):
        rising = [values[ratio] for ratio in ratios[:4]]
        falling = [values[ratio] for ratio in ratios[3:]]
        assert rising == sorted(rising)
        assert falling == sorted(falling, reverse=True)
        assert max(values[ratios[0]], values[ratios[-1]]) < 0.03
    assert all(gains[ratio] <= limits[ratio] for ratio in ratios)
    assert gains[1.0] > 0.5


def shaken(graph: Graph, pick: random.Random, by: float) -> Graph:
    """The same graph on another day: each op takes a little more or less."""
    ops = [
        Op(op.name, op.duration_s * pick.uniform(1 - by, 1 + by), op.inputs, op.reads)
        for op in graph.ops
    ]
    return Graph(graph.parameters, tuple(ops))


def test_step_time_follows_the_efficiency() -> None:
    """Over random orders of a graph whose ops vary by 10 %. In the paper R^2 is 0.98."""
    pick = random.Random(21)
    graph = synthetic.random_graph(pick, 40, 120, most_bytes=2 * 2**20, longest_s=TRANSFER_S / 3)
    steps, found = [], []
    for order in random_orders(300, of=40):
        overlap = pull_overlap(shaken(graph, pick, by=0.1), order, LINK)
        assert overlap.efficiency is not None
        steps.append(overlap.step_s)
        found.append(overlap.efficiency)
    assert statistics.correlation(found, steps) ** 2 >= 0.95
    assert statistics.correlation(found, steps) < 0


def straggling(graph: Graph, priorities: dict[str, int], workers: int = 4) -> float:
    """Longest wait of a worker for the others over the step time, in the mean of some steps."""
    pick = random.Random(22)
    parts = []
    for _ in range(50):
        took = [
            pull_overlap(shaken(graph, pick, 0.05), pull_order(graph, priorities, pick), LINK)
            for _ in range(workers)
        ]
        slowest_s = max(each.step_s for each in took)
        parts.append((slowest_s - min(each.step_s for each in took)) / slowest_s)
    return statistics.mean(parts)


def test_any_fixed_order_lets_workers_wait_less_for_each_other() -> None:
    graph = synthetic.sequential(op_s=TRANSFER_S)
    chance = straggling(graph, {})
    for fixed in (tac(graph, LINK), {f"w{i}": place for place, i in enumerate(range(31, -1, -1))}):
        assert straggling(graph, fixed) < chance / 2.3


def test_tac_reaches_what_is_possible_where_that_is_less_than_one() -> None:
    graph = synthetic.sequential(count=8, op_s=TRANSFER_S)
    order = pull_order(graph, tac(graph, LINK), random.Random(0))
    overlap = overlap_of(execute(graph, order, LINK))
    assert overlap.efficiency == pytest.approx(7 / 8)
    assert overlap.part_of_possible(pull_bound(graph, LINK).makespan_s) == pytest.approx(1.0)
