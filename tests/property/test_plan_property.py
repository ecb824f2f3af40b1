"""What holds for every graph: priorities are orders, E is at most 1, no schedule beats a bound."""

from __future__ import annotations

import random
from collections.abc import Mapping

from helpers.oracles import graphs
from helpers.oracles.pull_bound import pull_bound
from helpers.oracles.sent import max_lateness_s, pull_order
from helpers.property_cases import cases
from hypothesis import assume, given
from hypothesis import strategies as st

from hvd_order.base.link.link_model import LinkModel
from hvd_order.planning.bounds.bound import program_optimum_s, step_bound_s
from hvd_order.planning.graph.graph import Graph, GraphOp, GraphParameter
from hvd_order.planning.orders.due_date import due_date
from hvd_order.planning.orders.registry import ORDERS, order
from hvd_order.planning.orders.tac import tac
from hvd_order.planning.steps.efficiency import overlap_of
from hvd_order.planning.steps.execution import execute, pull_overlap
from hvd_order.planning.steps.program import steady_step_s

LITTLE = 1e-9  # rounding
links = st.builds(
    LinkModel,
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([0.0, 0.1, 3.0]),
    st.sampled_from([0.1, 1.0]),
)


@st.composite
def forward_graphs(draw: st.DrawFn, most_transfers: int = 6) -> Graph:
    """Whole seconds, so that ties are common; parameters that nothing reads, or several ops do."""
    transfers = draw(st.integers(0, most_transfers))
    some = st.sets(st.integers(0, max(transfers - 1, 0)), max_size=min(transfers, 3))
    ops: list[GraphOp] = []
    for k in range(draw(st.integers(0, 8))):
        inputs = draw(st.sets(st.integers(0, k - 1), max_size=3)) if k else set()
        reads = draw(some) if transfers else set()
        ops.append(
            GraphOp(
                f"op{k}",
                draw(st.integers(0, 4)),
                tuple(f"op{i}" for i in sorted(inputs)),
                tuple(f"w{i}" for i in sorted(reads)),
            )
        )
    sizes = draw(st.lists(st.integers(0, 9), min_size=transfers, max_size=transfers))
    return Graph(tuple(GraphParameter(f"w{i}", n) for i, n in enumerate(sizes)), tuple(ops))


training_graphs = st.builds(graphs.with_backward, forward_graphs(), st.sampled_from([0.5, 1, 2]))
seeds = st.integers(0, 2**16).map(random.Random)


def order_by(graph: Graph, priorities: Mapping[str, int], pick: random.Random) -> list[int]:
    found = pull_order(graph, priorities, pick)
    assert sorted(found) == list(range(len(graph.parameters)))
    return found


@cases(150)
@given(graph=st.one_of(forward_graphs(), training_graphs), link=links, pick=seeds)
def test_priorities_order_all_parameters(
    graph: Graph, link: LinkModel, pick: random.Random
) -> None:
    for name in ORDERS:
        priorities = order(name, graph, link)
        assert set(priorities) == {p.name for p in graph.parameters}
        # Each is the number of those before it, so a sender can count.
        for value in priorities.values():
            assert sum(other < value for other in priorities.values()) == value
        by_rank = [priorities[graph.parameters[i].name] for i in order_by(graph, priorities, pick)]
        assert by_rank == sorted(by_rank)
    assert sorted(tac(graph, link).values()) == list(range(len(graph.parameters)))


@cases(150)
@given(graph=forward_graphs(), link=links, pick=seeds)
def test_no_execution_beats_the_bound(graph: Graph, link: LinkModel, pick: random.Random) -> None:
    bound = pull_bound(graph, link)
    assert bound.exact
    for name in (*ORDERS, None):
        priorities = {} if name is None else order(name, graph, link)
        spans = execute(graph, order_by(graph, priorities, pick), link)
        assume(spans)
        overlap = overlap_of(spans)
        assert overlap.step_s >= bound.makespan_s * (1 - LITTLE)
        assert overlap.busiest_s * (1 - LITTLE) <= bound.makespan_s
        # All channels and processors work, one at a time at worst.
        assert overlap.step_s <= overlap.serial_s * (1 + LITTLE)
        if overlap.efficiency is not None:
            assert -LITTLE <= overlap.efficiency <= 1 + LITTLE
            assert 0 <= overlap.speedup <= 1 + LITTLE


@cases(150)
@given(graph=forward_graphs(most_transfers=2), link=links, pick=seeds)
def test_tac_is_best_for_two_transfers(graph: Graph, link: LinkModel, pick: random.Random) -> None:
    assume(graph.parameters)
    found = pull_overlap(graph, order_by(graph, tac(graph, link), pick), link).step_s
    assert found <= pull_bound(graph, link).makespan_s * (1 + LITTLE)


@cases(150)
@given(
    pairs=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8),
    pick=seeds,
)
def test_tac_is_best_for_transfers_that_unlock_an_op_each(
    pairs: list[tuple[int, float]], pick: random.Random
) -> None:
    graph, link = graphs.independent(pairs), LinkModel(0.0, 0.0, 1.0)
    found = pull_overlap(graph, order_by(graph, tac(graph, link), pick), link).step_s
    assert found <= pull_bound(graph, link).makespan_s * (1 + LITTLE)


@cases(100)
@given(graph=training_graphs, link=links, pick=seeds, slice_bytes=st.integers(1, 10))
def test_no_order_and_no_slices_beat_the_optimum(
    graph: Graph, link: LinkModel, pick: random.Random, slice_bytes: int
) -> None:
    best_s = program_optimum_s(graph, link)
    assert step_bound_s(graph, link) <= best_s * (1 + LITTLE)
    for name in ORDERS:
        priorities = order(name, graph, link)
        assert steady_step_s(graph, priorities, link) >= best_s * (1 - LITTLE)
        assert steady_step_s(graph, priorities, link, slice_bytes) >= best_s * (1 - LITTLE)
        late_s = max_lateness_s(graph, priorities, link)
        assert late_s >= max_lateness_s(graph, due_date(graph, link), link) - LITTLE


@cases(60)
@given(graph=training_graphs, faster=st.floats(0.1, 1.0))
def test_a_faster_link_is_never_slower(graph: Graph, faster: float) -> None:
    slow, fast = LinkModel(0.0, 0.0, 1.0), LinkModel(0.0, 0.0, faster)
    for bound in (program_optimum_s, step_bound_s):
        assert bound(graph, fast) <= bound(graph, slow) * (1 + LITTLE)
