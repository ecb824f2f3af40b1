"""The dependency graph: what it accepts, what it derives, what it says about mistakes."""

from __future__ import annotations

import math

import pytest
from helpers.oracles.graphs import chain, figure_1, sequential, with_backward

from hvd_order.base.errors import InvalidUsage
from hvd_order.planning.graph.graph import Graph, GraphOp, GraphParameter, members
from hvd_order.planning.steps.program import gradient_transfers, unhindered

W = GraphParameter("w", 8)
V = GraphParameter("v", 4)


def names(graph: Graph, mask: int) -> set[str]:
    return {graph.parameters[i].name for i in members(mask)}


def test_an_op_needs_what_its_inputs_need() -> None:
    graph = figure_1()
    assert [names(graph, mask) for mask in graph.needs] == [{"recv1"}, {"recv1", "recv2"}]


def test_ops_run_in_the_order_given_but_behind_their_inputs() -> None:
    late = GraphOp("late", 1.0, inputs=("early", "middle"))
    graph = Graph((), (late, GraphOp("middle", 1.0), GraphOp("early", 1.0), GraphOp("free", 1.0)))
    assert [op.name for op in graph.ops] == ["middle", "early", "late", "free"]
    twice = Graph((), (GraphOp("square", 1.0, inputs=("x", "x")), GraphOp("x", 1.0)))
    assert [op.name for op in twice.ops] == ["x", "square"]


def test_a_gradient_is_due_when_its_reader_starts_in_the_next_step() -> None:
    # time     0  1     3        6           10
    #          f0 f1    b1       b0          | f0 f1
    graph = chain([1.0, 2.0], [4.0, 3.0], [10, 20])
    first, second = gradient_transfers(graph)
    assert (first.name, first.size_bytes, first.release_s, first.due_s) == ("w0", 10, 10.0, 10.0)
    assert (second.name, second.release_s, second.due_s) == ("w1", 6.0, 11.0)


def test_resources_run_side_by_side_but_for_what_they_need_of_each_other() -> None:
    ops = (
        GraphOp("a", 2.0),
        GraphOp("copy", 3.0, resource="copy engine"),
        GraphOp("b", 1.0),
        GraphOp("c", 1.0, inputs=("copy",)),
    )
    assert unhindered(Graph((), ops)) == [(0.0, 2.0), (0.0, 3.0), (2.0, 3.0), (3.0, 4.0)]


def test_a_tied_parameter_is_ready_with_its_last_gradient_and_due_at_its_first_reader() -> None:
    ops = (
        GraphOp("embed", 1.0, reads=("w",)),
        GraphOp("mix", 1.0, ("embed",), reads=("v",)),
        GraphOp("project", 1.0, ("mix",), reads=("w",)),
        GraphOp("project.grad", 1.0, ("project",), produces=("w",)),
        GraphOp("mix.grad", 1.0, ("project.grad",), produces=("v",)),
        GraphOp("embed.grad", 1.0, ("mix.grad",), produces=("w",)),
    )
    tied = gradient_transfers(Graph((W, V), ops))[0]
    assert (tied.release_s, tied.due_s) == (6.0, 6.0)


def test_the_backward_pass_mirrors_the_forward_pass() -> None:
    graph = with_backward(sequential(3, op_s=1.0), factor=2.0)
    assert [op.name for op in graph.ops[4:]] == ["layer2.grad", "layer1.grad", "layer0.grad"]
    assert graph.compute_s == pytest.approx(9.0)
    assert [t.release_s for t in gradient_transfers(graph)] == [9.0, 7.0, 5.0]
    assert all(mask == 0b111 for mask in graph.needs[3:])


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        ((GraphOp("a", 1.0), GraphOp("a", 2.0)), "the op 'a' is listed 2 times"),
        ((GraphOp("a", -1.0),), "the op 'a' takes -1.0 s"),
        ((GraphOp("a", math.nan),), "the op 'a' takes nan s"),
        ((GraphOp("a", math.inf),), "the op 'a' takes inf s"),
        ((GraphOp("a", 1.0, ("b",)),), "the op 'a' needs the op 'b', which the graph lacks"),
        ((GraphOp("a", 1.0, reads=("x",)),), "the op 'a' reads the parameter 'x', which"),
        ((GraphOp("a", 1.0, produces=("x",)),), "the op 'a' produces the parameter 'x', which"),
        ((GraphOp("a", 1.0, ("a",)),), "'a' -> 'a'"),
        (
            (
                GraphOp("z", 1.0),
                GraphOp("a", 1, ("c", "z")),
                GraphOp("b", 1, ("a",)),
                GraphOp("c", 1, ("b",)),
            ),
            "'a' -> 'c' -> 'b' -> 'a'",
        ),
        (
            (GraphOp("in", 1, ("a",)), GraphOp("a", 1.0, ("b",)), GraphOp("b", 1.0, ("a",))),
            "'a' -> 'b' -> 'a'",
        ),
    ],
)
def test_mistakes_are_named(ops: tuple[GraphOp, ...], message: str) -> None:
    with pytest.raises(InvalidUsage) as raised:
        Graph((W,), ops)
    assert message in str(raised.value)


def test_mistakes_in_parameters_are_named() -> None:
    with pytest.raises(InvalidUsage, match="parameter 'w' is listed 2 times"):
        Graph((W, W), ())
    with pytest.raises(InvalidUsage, match="parameter 'w' has a size of -1 bytes"):
        Graph((GraphParameter("w", -1),), ())


def test_positions_of_a_set() -> None:
    assert members(0) == []
    assert members(0b1) == [0]
    assert members(1 << 400 | 0b1010) == [1, 3, 400]
