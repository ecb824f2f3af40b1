"""What holds for every chain that is clipped by its global norm."""

from __future__ import annotations

import math
import random

from helpers.oracles import graphs
from helpers.property_cases import cases
from hypothesis import assume, given
from hypothesis import strategies as st

from hvd_order.base.link.link_model import LinkModel
from hvd_order.planning.bounds.bound import chain_optimum_s, program_optimum_s
from hvd_order.planning.bounds.clipped_bound import (
    clipped_chain_optimum_s,
    clipped_program_optimum_s,
    late_gather_chain_s,
    unsplit_clipped_chain_s,
)

LITTLE = 1e-9  # rounding
Chain = tuple[list[float], list[float], list[float]]
seconds = st.one_of(st.just(0.0), st.floats(0.0, 10.0))


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    count = draw(st.integers(0, 8))
    times = st.lists(seconds, min_size=count, max_size=count)
    return draw(times), draw(times), draw(times)


def compute_s(chain: Chain) -> float:
    return math.fsum(chain[0]) + math.fsum(chain[1])


@cases(200)
@given(chain=chains(), barrier_s=seconds)
def test_splitting_is_never_slower_and_clipping_never_faster(
    chain: Chain, barrier_s: float
) -> None:
    clipped_s = clipped_chain_optimum_s(*chain)
    assert clipped_s <= unsplit_clipped_chain_s(*chain) + LITTLE
    assert clipped_s <= late_gather_chain_s(*chain) + LITTLE
    assert clipped_s >= chain_optimum_s(*chain) - LITTLE
    assert clipped_s >= max(compute_s(chain), math.fsum(chain[2])) - LITTLE
    with_barrier_s = clipped_chain_optimum_s(*chain, barrier_s)
    assert clipped_s - LITTLE <= with_barrier_s <= clipped_s + barrier_s + LITTLE


@cases(200)
@given(chain=chains(), barrier_s=seconds)
def test_a_chain_is_a_program(chain: Chain, barrier_s: float) -> None:
    assume(chain[0])  # a program without parameters waits for no norm
    forward_s, backward_s, wire_s = chain
    sizes = [round(1e6 * each_s) for each_s in wire_s]
    graph = graphs.chain(forward_s, backward_s, sizes)
    closed_s = clipped_chain_optimum_s(forward_s, backward_s, [1e-6 * n for n in sizes], barrier_s)
    played_s = clipped_program_optimum_s(graph, LinkModel(0.0, 0.0, 1e-6), barrier_s)
    assert math.isclose(played_s, closed_s, rel_tol=1e-6, abs_tol=LITTLE)


@cases(60)
@given(seed=st.integers(0, 2**16), speed=st.sampled_from([1e-9, 1e-8, 1e-7]))
def test_clipping_makes_no_program_faster_and_awaiting_all_is_slower(
    seed: int, speed: float
) -> None:
    pick = random.Random(seed)
    forward = graphs.random_graph(pick, pick.randint(1, 8), 12, most_bytes=10**7, longest_s=0.03)
    graph = graphs.with_backward(forward)
    link = LinkModel(0.0, 0.0, speed)
    clipped_s = clipped_program_optimum_s(graph, link)
    total_s = math.fsum(op.duration_s for op in graph.ops)
    wire_s = math.fsum(p.size_bytes for p in graph.parameters) * speed
    assert program_optimum_s(graph, link) <= clipped_s * (1 + LITTLE)
    assert clipped_s <= (total_s + wire_s) * (1 + LITTLE)
