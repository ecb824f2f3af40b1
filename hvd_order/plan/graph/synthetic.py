"""Graphs of the papers and for tests: by hand, by rule, and random ones by seed."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from hvd_order.plan.graph.graph import Graph, Op, Parameter

__all__ = [
    "chain",
    "figure_1",
    "growing_joins",
    "independent",
    "parallel",
    "random_graph",
    "resnet_152",
    "sequential",
    "with_backward",
]

_MIB = 2**20


def chain(
    forward_s: Sequence[float], backward_s: Sequence[float], size_bytes: Sequence[int]
) -> Graph:
    """Layers in a row with one parameter each, ``w0`` first: forward, and backward in reverse."""
    count = len(size_bytes)
    ops = []
    last: tuple[str, ...] = ()
    for i in range(count):
        ops.append(Op(f"f{i}", forward_s[i], last, reads=(f"w{i}",)))
        last = (f"f{i}",)
    for i in reversed(range(count)):
        ops.append(Op(f"b{i}", backward_s[i], last, produces=(f"w{i}",), phase="backward"))
        last = (f"b{i}",)
    return Graph(tuple(Parameter(f"w{i}", size_bytes[i]) for i in range(count)), tuple(ops))


def sequential(count: int = 32, op_s: float = 1.0, size_bytes: int = 2 * _MIB) -> Graph:
    """seq-32: the forward pass of layers in a row, a variable each. Order matters.

    Source:
        ``models.py`` of the authors' ``tf-comm-scheduling``: 32 layers of one variable of 2 MiB.
    """
    ops = [
        Op(f"layer{i}", op_s, (f"layer{i - 1}",) if i else (), reads=(f"w{i}",))
        for i in range(count)
    ]
    return Graph(_parameters(count, size_bytes), tuple(ops))


def parallel(count: int = 32, op_s: float = 1.0, size_bytes: int = 2 * _MIB) -> Graph:
    """par-32: one layer that adds up a product with each of its variables. Order is irrelevant.

    Source:
        As :func:`sequential`: one layer of 32 variables.
    """
    ops = [Op(f"multiply{i}", op_s, reads=(f"w{i}",)) for i in range(count)]
    total = Op("add", 0.0, tuple(op.name for op in ops))
    return Graph(_parameters(count, size_bytes), (*ops, total))


def independent(pairs: Sequence[tuple[int, float]]) -> Graph:
    """Transfers that unlock an op each: a flow shop of two machines, Johnson's problem.

    Args:
        pairs: (bytes, seconds of its op) of each.
    """
    ops = [Op(f"op{i}", seconds, reads=(f"w{i}",)) for i, (_, seconds) in enumerate(pairs)]
    parameters = tuple(Parameter(f"w{i}", size) for i, (size, _) in enumerate(pairs))
    return Graph(parameters, tuple(ops))


def figure_1(size_bytes: tuple[int, int] = (1, 1), op_s: tuple[float, float] = (1.0, 1.0)) -> Graph:
    """TicTac, figure 1: op1 needs recv1; op2 needs op1 and recv2."""
    return Graph(
        (Parameter("recv1", size_bytes[0]), Parameter("recv2", size_bytes[1])),
        (Op("op1", op_s[0], reads=("recv1",)), Op("op2", op_s[1], ("op1",), reads=("recv2",))),
    )


def growing_joins() -> Graph:
    """TicTac, case 2 of section 4: opa needs A and B, opb needs opa and C, opc needs opb and D."""
    return Graph(
        tuple(Parameter(name, 1) for name in "ABCD"),
        (
            Op("opa", 1.0, reads=("A", "B")),
            Op("opb", 1.0, ("opa",), reads=("C",)),
            Op("opc", 1.0, ("opb",), reads=("D",)),
        ),
    )


def with_backward(forward: Graph, factor: float = 2.0) -> Graph:
    """A training step: a forward graph, and its gradients in reverse.

    The gradient op of an op takes ``factor`` times as long, and needs the op itself and the
    gradient ops of all that use its result; those that nobody uses make up the loss.
    """
    gradients_of_users: defaultdict[str, list[str]] = defaultdict(list)
    for op in forward.ops:
        for name in op.inputs:
            gradients_of_users[name].append(f"{op.name}.grad")
    results = tuple(op.name for op in forward.ops if op.name not in gradients_of_users)
    backward = [
        replace(
            op,
            name=f"{op.name}.grad",
            duration_s=factor * op.duration_s,
            inputs=(op.name, "loss", *gradients_of_users[op.name]),
            reads=(),
            produces=op.reads,
            phase="backward",
        )
        for op in reversed(forward.ops)
    ]
    return Graph(forward.parameters, (*forward.ops, Op("loss", 0.0, results), *backward))


def random_graph(
    pick: random.Random, transfers: int, ops: int, *, most_bytes: int = 100, longest_s: float = 100
) -> Graph:
    """A forward graph without structure: each op has up to 3 inputs and reads up to 2 parameters.

    Every parameter is read by some op.
    """
    reads: list[set[int]] = [set() for _ in range(ops)]
    for i in range(transfers):
        reads[pick.randrange(ops)].add(i)
    made = []
    for k in range(ops):
        if pick.random() < 0.3:
            reads[k].add(pick.randrange(transfers))
        inputs = pick.sample(range(k), min(k, pick.randint(0, 3)))
        made.append(
            Op(
                f"op{k}",
                pick.uniform(0, longest_s),
                tuple(f"op{i}" for i in sorted(inputs)),
                reads=tuple(f"w{i}" for i in sorted(reads[k])),
            )
        )
    parameters = tuple(Parameter(f"w{i}", pick.randint(1, most_bytes)) for i in range(transfers))
    return Graph(parameters, tuple(made))


def resnet_152(ops: int = 4655, layers: int = 121) -> Graph:
    """A training graph as large as TicTac's ResNet-152: 4,655 ops, 363 parameters.

    Layers of a convolution and a normalization (weight, scale, offset), a skip connection around
    every third, and as many small ops behind each layer as make up the number.
    """
    pick = random.Random(152)
    parameters = []
    forward: list[Op] = []
    last: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    # Half of all ops, the loss apart, are forward.
    small, more = divmod((ops - 1) // 2 - 3 * layers, layers)
    for layer in range(layers):
        names = tuple(f"{layer}.{part}" for part in ("weight", "scale", "offset"))
        parameters += [Parameter(names[0], pick.randrange(_MIB, 6 * _MIB))]
        parameters += [Parameter(name, 4096) for name in names[1:]]
        forward.append(Op(f"{layer}.convolve", pick.uniform(1e-3, 3e-3), last, reads=names[:1]))
        last = (forward[-1].name,)
        forward.append(Op(f"{layer}.normalize", 3e-4, last, reads=names[1:]))
        last = (forward[-1].name,)
        if layer % 3 == 2:
            last = (*last, *skip)
        for number in range(small + (layer < more)):
            forward.append(Op(f"{layer}.small{number}", 2e-5, last))
            last = (forward[-1].name,)
        forward.append(Op(f"{layer}.activate", 1e-4, last))
        last = (forward[-1].name,)
        if layer % 3 == 2:
            skip = last
    return with_backward(Graph(tuple(parameters), tuple(forward)))


def _parameters(count: int, size_bytes: int) -> tuple[Parameter, ...]:
    return tuple(Parameter(f"w{i}", size_bytes) for i in range(count))
