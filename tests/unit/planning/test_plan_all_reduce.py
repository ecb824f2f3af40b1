"""Orders for gradients: earliest due date is the best there is, and what slices do."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import pytest
from helpers.oracles import graphs
from helpers.oracles.exhaustive_link import best_step_s
from helpers.oracles.sent import deliver, max_lateness_s

from hvd_order.base.errors import InvalidUsage
from hvd_order.base.link.link_model import LinkModel
from hvd_order.planning.bounds.bound import chain_optimum_s, program_optimum_s, step_bound_s
from hvd_order.planning.graph.graph import Graph, GraphOp, GraphParameter
from hvd_order.planning.orders.baselines import arrival
from hvd_order.planning.orders.due_date import due_date
from hvd_order.planning.orders.registry import order
from hvd_order.planning.steps.delivery import GradientDelivery
from hvd_order.planning.steps.program import gradient_transfers, steady_step_s

SECONDS = LinkModel(0.0, 0.0, 1.0)  # a byte takes a second: sizes are times


# ------------------------------------------------------------------------- the link


def test_a_slice_in_flight_is_not_interrupted() -> None:
    # time      0      2.5     5      7.5    9
    # link      fc/0   fc/1    conv   fc/2           half a second each slice; latency at the end
    transfers = [GradientDelivery("conv", 2, 3.0, 0.0), GradientDelivery("fc", 5, 0.0, 0.0)]
    link = LinkModel(latency_s=10.0, slice_cost_s=0.5, seconds_per_byte=1.0)
    arrived = deliver(transfers, {"conv": 0, "fc": 1}, link, slice_bytes=2)
    assert arrived == {"conv": 17.5, "fc": 19.0}


# ------------------------------------------------------------------------- due dates


def test_what_is_read_first_goes_first() -> None:
    graph = graphs.with_backward(graphs.sequential(4))
    assert due_date(graph, SECONDS) == {"w0": 0, "w1": 1, "w2": 2, "w3": 3}
    assert arrival(graph, SECONDS) == {"w3": 0, "w2": 1, "w1": 2, "w0": 3}


def test_what_one_op_reads_is_needed_at_once() -> None:
    graph = graphs.resnet_152(ops=41, layers=3)
    assert list(due_date(graph, SECONDS).values()) == [0, 1, 1, 3, 4, 4, 6, 7, 7]


@pytest.mark.parametrize("seed", range(8))
def test_earliest_due_date_is_the_best_of_everything_that_a_link_can_do(seed: int) -> None:
    pick = random.Random(seed)
    for _ in range(40):
        count = pick.randint(1, 4)
        forward, backward = ([pick.randint(1, 3) for _ in range(count)] for _ in range(2))
        wire = [pick.randint(0, 12 // count) for _ in range(count)]
        assert chain_optimum_s(forward, backward, wire) == best_step_s(forward, backward, wire)


def test_slices_cost_what_they_cost_and_delay_by_one_of_them() -> None:
    pick = random.Random(9)
    for _ in range(100):
        graph = training_graph(pick, transfers=pick.randint(1, 6), ops=8)
        graph = Graph(
            tuple(replace(p, size_bytes=4 * p.size_bytes) for p in graph.parameters), graph.ops
        )
        priorities = due_date(graph, SECONDS)
        free = LinkModel(latency_s=0.0, slice_cost_s=0.0, seconds_per_byte=1.0)
        late_s = max_lateness_s(graph, priorities, free)
        sliced_s = max_lateness_s(graph, priorities, free, slice_bytes=4)
        assert late_s - 1e-9 <= sliced_s <= late_s + 4 + 1e-9
        far = replace(free, latency_s=0.7)
        assert max_lateness_s(graph, priorities, far, 4) == pytest.approx(sliced_s + 0.7)
        dear = LinkModel(0.0, slice_cost_s=2.0, seconds_per_byte=1.0)  # 4 bytes take 6 s
        as_bytes = LinkModel(0.0, 0.0, seconds_per_byte=1.5)
        assert max_lateness_s(graph, priorities, dear, 4) == pytest.approx(
            max_lateness_s(graph, priorities, as_bytes, 4)
        )


@pytest.mark.parametrize("slice_bytes", [0, -4])
def test_slices_without_bytes_are_refused(slice_bytes: int) -> None:
    graph = training_graph(random.Random(9), transfers=3, ops=8)
    with pytest.raises(InvalidUsage, match="carries nothing; give a positive size"):
        steady_step_s(graph, due_date(graph, SECONDS), SECONDS, slice_bytes)


# ------------------------------------------------------------------------- bounds


def training_graph(pick: random.Random, transfers: int, ops: int) -> Graph:
    forward = graphs.random_graph(pick, transfers, ops, most_bytes=9, longest_s=3)
    return graphs.with_backward(forward, pick.uniform(0.5, 2))


def after_one_another(first: Graph, second: Graph) -> Graph:
    """Two models in turns, as a GAN's: the second is read after the first has its gradients."""

    def renamed(graph: Graph, mark: str) -> tuple[list[GraphParameter], list[GraphOp]]:
        def names(of: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(mark + name for name in of)

        return (
            [replace(p, name=mark + p.name) for p in graph.parameters],
            [
                replace(
                    op,
                    name=mark + op.name,
                    inputs=names(op.inputs),
                    reads=names(op.reads),
                    produces=names(op.produces),
                )
                for op in graph.ops
            ],
        )

    (a, ops_a), (b, ops_b) = renamed(first, "a."), renamed(second, "b.")
    return Graph((*a, *b), (*ops_a, *ops_b))


def programs(graph: Graph) -> list[Graph]:
    """The same graph in every order in which its ops can run."""
    found: list[Graph] = []

    def extend(done: list[GraphOp], names: set[str], left: list[GraphOp]) -> None:
        if not left:
            found.append(Graph(graph.parameters, tuple(done)))
        for op in left:
            if names.issuperset(op.inputs):
                rest = [other for other in left if other is not op]
                extend([*done, op], names | {op.name}, rest)

    extend([], set(), list(graph.ops))
    return found


def test_no_order_of_ops_and_transfers_beats_the_bound() -> None:
    """Branches, joins, tied parameters and two models in turns, against every order of ops."""
    pick = random.Random(10)
    tight = []
    for number in range(90):
        graph = training_graph(pick, transfers=pick.randint(1, 4), ops=pick.randint(2, 4))
        if number % 3 == 2:
            small = [training_graph(pick, pick.randint(1, 2), 1) for _ in range(2)]
            graph = after_one_another(*small)
        best_s = min(program_optimum_s(program, SECONDS) for program in programs(graph))
        bound_s = step_bound_s(graph, SECONDS)
        assert bound_s <= best_s * (1 + 1e-9)
        tight.append(bound_s / best_s)
    assert statistics.median(tight) == pytest.approx(1.0)
    assert min(tight) > 0.7


def steps_on_streams_s(graph: Graph, steps: int = 12) -> float:
    """Mean step time of one schedule: program order on each stream, the fluid link by due dates.

    For graphs whose forward pass reads everything before the first gradient.
    """
    arrived = dict.fromkeys((p.name for p in graph.parameters), 0.0)
    lengths = []
    for _ in range(steps):
        free: dict[str, float] = {}
        ends: dict[str, float] = {}
        for op in graph.ops:
            waits = [ends[name] for name in op.inputs] + [arrived[name] for name in op.reads]
            ends[op.name] = max([free.get(op.resource, 0.0), *waits]) + op.duration_s
            free[op.resource] = ends[op.name]
        lengths.append(max(ends.values()))
        transfers = [
            replace(
                each, release_s=max(ends[op.name] for op in graph.ops if each.name in op.produces)
            )
            for each in gradient_transfers(graph)
        ]
        sent = deliver(transfers, due_date(graph, SECONDS), SECONDS)
        arrived = {name: end_s - lengths[-1] for name, end_s in sent.items()}
    return statistics.mean(lengths[steps // 2 :])


def test_no_schedule_on_two_streams_beats_the_bound() -> None:
    pick = random.Random(14)
    reached = []
    for _ in range(150):
        graph = training_graph(pick, transfers=pick.randint(1, 4), ops=pick.randint(2, 6))
        streams = tuple(replace(op, resource=pick.choice("ab")) for op in graph.ops)
        split = Graph(graph.parameters, streams)
        bound_s, step_s = step_bound_s(split, SECONDS), steps_on_streams_s(split)
        assert bound_s <= step_s * (1 + 1e-9)
        assert bound_s <= step_bound_s(graph, SECONDS) * (1 + 1e-9)
        reached.append(bound_s / step_s)
    assert statistics.median(reached) > 0.8


def test_several_streams_need_more_than_program_order() -> None:
    graph = Graph((), (GraphOp("a", 1.0), GraphOp("b", 1.0, resource="copy engine")))
    with pytest.raises(InvalidUsage, match="compute, copy engine"):
        program_optimum_s(graph, SECONDS)


def test_a_model_without_parameters_takes_as_long_as_it_computes() -> None:
    assert chain_optimum_s([], [], []) == 0.0
    assert program_optimum_s(Graph((), (GraphOp("a", 2.0),)), SECONDS) == pytest.approx(2.0)


def test_a_gradient_for_a_parameter_that_nothing_reads_still_has_to_travel() -> None:
    graph = Graph(
        (GraphParameter("w", 9),), (GraphOp("a", 1.0), GraphOp("b", 2.0, produces=("w",)))
    )
    assert program_optimum_s(graph, SECONDS) == pytest.approx(11.0)  # 9, and 2 to compute it anew
    assert step_bound_s(graph, SECONDS) == pytest.approx(11.0)


# ------------------------------------------------------------------------- registry


def test_unknown_names_get_the_list() -> None:
    graph = graphs.with_backward(graphs.sequential(5))
    with pytest.raises(InvalidUsage, match=r"'best'.*arrival, due_date, random, search, tac, tic"):
        order("best", graph, SECONDS)
