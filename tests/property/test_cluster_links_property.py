"""Whatever the jobs and the links: no link carries too much, and no work is lost."""

from __future__ import annotations

from itertools import pairwise

import pytest
from helpers.property_cases import cases
from hypothesis import given
from hypothesis import strategies as st

from hvd_order.cluster.links.fairness import shares
from hvd_order.cluster.links.jobs import LinkJob, LinkSharing
from hvd_order.cluster.links.shared import alone_s, simulate_shared
from hvd_order.cluster.links.step import Inside, step_of
from hvd_order.planning.graph.synthetic import chain

LINKS = 4
INSIDE: tuple[Inside, ...] = ("buckets", "arrival", "ordered")

loads = st.dictionaries(
    st.integers(0, LINKS - 1), st.integers(1, 8).map(lambda n: n / 4), min_size=1
)
capacities = st.lists(st.integers(1, 12).map(float), min_size=LINKS, max_size=LINKS)
quarters = st.integers(0, 8).map(lambda n: n / 4)


@st.composite
def jobs(draw: st.DrawFn) -> LinkJob:
    count = draw(st.integers(1, 4))
    graph = chain(
        [0.25, *draw(st.lists(quarters, min_size=count - 1, max_size=count - 1))],
        draw(st.lists(quarters, min_size=count, max_size=count)),
        draw(st.lists(st.integers(0, 12), min_size=count, max_size=count)),
    )
    step = step_of(graph, draw(st.sampled_from(INSIDE)), bucket_bytes=8, first_bytes=2)
    return LinkJob("", step, draw(loads))


@cases(200)
@given(st.lists(st.tuples(loads, st.integers(0, 2)), min_size=1, max_size=6), capacities)
def test_shares_fill_links_and_no_more(
    flows: list[tuple[dict[int, float], int]], capacity: list[float]
) -> None:
    rates = shares([load for load, _ in flows], [level for _, level in flows], capacity)

    def used(link: int, level: int) -> float:
        """By flows of this level and of those that go before it."""
        return sum(
            rate * load.get(link, 0.0)
            for rate, (load, own) in zip(rates, flows, strict=True)
            if own <= level
        )

    for link in range(LINKS):
        assert used(link, 2) <= capacity[link] * (1 + 1e-9)
    for rate, (load, level) in zip(rates, flows, strict=True):
        # Each flow has a link that its level and those before it fill, and on which nobody of its
        # level is faster.
        pressure = rate * max(load.values())
        assert any(
            used(link, level) >= capacity[link] * (1 - 1e-9)
            and all(
                other * max(its.values()) <= pressure + 1e-9
                for other, (its, own) in zip(rates, flows, strict=True)
                if own == level and link in its
            )
            for link in load
        )


@cases(150)
@given(st.lists(st.tuples(jobs(), st.integers(0, 1), quarters), min_size=1, max_size=4), capacities)
def test_links_carry_what_iterations_need_and_never_too_much(
    drawn: list[tuple[LinkJob, int, float]], capacity: list[float]
) -> None:
    running = [job for job, _, _ in drawn]
    sharing = LinkSharing([n for _, n, _ in drawn], [s for _, _, s in drawn], [0.0] * len(drawn))
    until_s = 24.0
    traces = simulate_shared(running, capacity, until_s, sharing)
    moments = sorted({t for trace in traces for begin, end, _ in trace.sent for t in (begin, end)})
    for begin, end in pairwise(moments):
        middle = (begin + end) / 2
        for link in range(LINKS):
            load = sum(
                rate * job.load.get(link, 0.0)
                for job, trace in zip(running, traces, strict=True)
                for first, last, rate in trace.sent
                if first < middle < last
            )
            assert load <= capacity[link] * (1 + 1e-9)
    for job, trace in zip(running, traces, strict=True):
        begun = len(trace.starts_s)
        assert trace.busy_s <= until_s
        assert (begun - 1) * job.step.compute_s - 1e-9 <= trace.busy_s
        assert trace.busy_s <= begun * job.step.compute_s + 1e-9
        # What the iteration before the last one sent has arrived, at the latest in this one.
        assert trace.sent_bytes <= begun * job.step.size_bytes + 1e-6
        assert trace.sent_bytes >= (begun - 2) * job.step.size_bytes - 1e-6


@cases(60)
@given(jobs(), jobs(), capacities)
def test_the_first_of_two_jobs_does_not_notice_the_other(
    one: LinkJob, other: LinkJob, capacity: list[float]
) -> None:
    until_s = 20.0
    sharing = LinkSharing([0, 1], [0.0, 0.0], [0.0, 0.0])
    beside = simulate_shared([one, other], capacity, until_s, sharing)[0]
    alone = simulate_shared([one], capacity, until_s)[0]
    # Rounding decides whether what is due at the end is seen.
    starts = [[at for at in each.starts_s if at < until_s - 1e-6] for each in (beside, alone)]
    assert starts[0] == pytest.approx(starts[1])
    assert beside.sent_bytes == pytest.approx(alone.sent_bytes)


@cases(60)
@given(jobs(), capacities)
def test_an_iteration_takes_at_least_its_computation_and_its_transfers(
    job: LinkJob, capacity: list[float]
) -> None:
    link_s = job.link_s(capacity)
    per_byte = max(load / capacity[link] for link, load in job.load.items())
    seconds = alone_s(job.step, per_byte)
    assert seconds >= max(job.step.compute_s, link_s) - 1e-9
    assert seconds <= job.step.compute_s + link_s + 1e-9
