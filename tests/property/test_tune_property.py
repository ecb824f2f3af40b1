"""The search by simulation: between the default and the bound, and repeatable."""

from __future__ import annotations

import random

import pytest
from helpers.oracles import graphs
from helpers.property_cases import cases
from hypothesis import given
from hypothesis import strategies as st

from hvd_order.planning.bounds.bound import program_optimum_s
from hvd_order.planning.graph.graph import Graph
from hvd_order.planning.predict.condensed import condensed, with_wire_sizes
from hvd_order.planning.predict.network import Network
from hvd_order.planning.predict.simulate import TransferSchedule, simulate
from hvd_order.planning.predict.tune import tune
from hvd_order.planning.predict.workload import workload_of

LITTLE = 1e-9  # rounding


@st.composite
def steps(draw: st.DrawFn) -> Graph:
    """Training steps of some milliseconds with some megabytes, with branches."""
    forward = graphs.random_graph(
        random.Random(draw(st.integers(0, 2**16))),
        draw(st.integers(1, 12)),
        draw(st.integers(1, 20)),
        most_bytes=draw(st.sampled_from([1000, 10**6, 2 * 10**7])),
        longest_s=draw(st.sampled_from([0.0, 0.001, 0.03])),
    )
    return graphs.with_backward(forward)


networks = st.builds(
    lambda ranks, rate, latency_s, lanes: Network.of_ring(ranks, rate, latency_s, lanes),
    st.sampled_from([2, 3, 8]),
    st.sampled_from([1e7, 1e8, 1e10]),
    st.sampled_from([0.0, 2e-5, 1e-3]),
    st.sampled_from([0, 1, 2]),
)


@cases(12)
@given(graph=steps(), network=networks, clipped=st.booleans())
def test_a_tuned_plan_is_between_the_bound_and_the_default(
    graph: Graph, network: Network, clipped: bool
) -> None:
    tuned = tune(graph, network, clipped=clipped)
    assert tuned.chosen.step_s <= tuned.default.step_s
    everything = [*tuned.outcomes, *tuned.rivals, *tuned.published.values()]
    assert all(tuned.bound_s <= outcome.step_s * (1 + LITTLE) for outcome in everything)
    assert tuned.bound_s <= tuned.ddp_s * (1 + LITTLE)

    plan = tuned.plan
    first, *others = plan.candidates
    assert (first.slice_settings, first.predicted_s) == (
        tuned.chosen.setting.slice_settings,
        tuned.chosen.step_s,
    )
    assert not any(
        settings.resembles(first.slice_settings)
        for settings in (other.slice_settings for other in others)
    )
    assert plan.differences({p.name: p.size_bytes for p in graph.parameters}) == []
    if plan.agreement == "planned":
        layout = workload_of(
            with_wire_sizes(graph),
            {p.name: i for i, p in enumerate((*plan.parameters, *plan.idle))},
        ).layout(first.slice_settings.slice_bytes, first.slice_settings.split)
        names = [layout.slice_name(i) for i in range(len(layout.slices))]
        assert sorted(plan.issue_order or ()) == sorted(names)
    else:
        assert plan.issue_order is None
    assert tune(graph, network, clipped=clipped).plan == plan


@cases(30)
@given(graph=steps(), network=networks, data=st.data())
def test_a_condensed_graph_takes_as_long(
    graph: Graph, network: Network, data: st.DataObject
) -> None:
    small = condensed(graph)
    assert len(small.ops) <= len(graph.ops)
    assert program_optimum_s(small, network.link) == pytest.approx(
        program_optimum_s(graph, network.link), rel=LITTLE
    )
    size = data.draw(st.sampled_from([2**14, 2**17, 2**22]))
    schedule = TransferSchedule(size, 2 * size, data.draw(st.sampled_from(["priority", "arrival"])))
    long_s, short_s = (
        simulate(workload_of(g), network.all_reduce(), schedule, ranks=network.ranks).step_s
        for g in (graph, small)
    )
    assert short_s == pytest.approx(long_s, rel=1e-6)
