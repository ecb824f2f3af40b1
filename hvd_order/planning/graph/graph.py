"""Dependency graph of one worker's step: its ops, what each op reads and what it produces.

Transfers are not nodes. Every parameter is one transfer, whose direction depends on the use: a
*pull* from a server has to arrive before the first op that reads the parameter (TicTac's recv), and
a *gradient* can be sent after the last op that produces it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress, count
from typing import Literal

from hvd_order.base.errors import InvalidUsage
from hvd_order.base.plan.parameter import GraphParameter, check_parameters, check_unique

__all__ = ["Graph", "GraphOp", "GraphParameter", "Phase", "bits", "members"]

Phase = Literal["forward", "backward", "update"]


@dataclass(frozen=True)
class GraphOp:
    """A computation that occupies a resource.

    Attributes:
        name: unique in its graph.
        duration_s: duration on a dedicated resource, without waits.
        inputs: names of ops whose results the op needs.
        reads: names of parameters that the op reads directly.
        produces: names of parameters whose gradient the op computes in whole or in part.
        resource: resource that the op occupies alone: "compute", a stream, a copy engine.
        phase: part of the step, for reports only; inputs alone determine the order.
    """

    name: str
    duration_s: float
    inputs: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    produces: tuple[str, ...] = ()
    resource: str = "compute"
    phase: Phase = "forward"


@dataclass(frozen=True)
class Graph:
    """Parameters and ops of one step. Immutable. Sets are bit masks of positions in the tuples.

    Attributes:
        parameters: parameters in any order; the order breaks ties of a rule.
        ops: ops in program order: as given, but each after its inputs.

    Raises:
        InvalidUsage: a name is a duplicate or unknown, a number is invalid, or ops wait for each
            other in a circle. The message names the op.
    """

    parameters: tuple[GraphParameter, ...]
    ops: tuple[GraphOp, ...]

    def __post_init__(self) -> None:
        check_parameters(self.parameters)
        check_unique("op", [op.name for op in self.ops])
        _check_values(self.parameters, self.ops)
        object.__setattr__(self, "ops", _behind_inputs(self.ops))

    @cached_property
    def parameter_position(self) -> dict[str, int]:
        """Position of each parameter in ``parameters``, by name."""
        return {parameter.name: i for i, parameter in enumerate(self.parameters)}

    @cached_property
    def op_position(self) -> dict[str, int]:
        """Position of each op in ``ops``, by name."""
        return {op.name: i for i, op in enumerate(self.ops)}

    @cached_property
    def needs(self) -> tuple[int, ...]:
        """For each op, the parameters that the op or its dependencies read.

        Source:
            ``op.dep`` of TicTac (MLSys 2019), section 3.
        """
        needs: list[int] = []
        for op in self.ops:
            mask = 0
            for name in op.inputs:
                mask |= needs[self.op_position[name]]
            for name in op.reads:
                mask |= 1 << self.parameter_position[name]
            needs.append(mask)
        return tuple(needs)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """For each parameter, the ops that read it directly, in program order."""
        return self._by_parameter([op.reads for op in self.ops])

    @cached_property
    def producers(self) -> tuple[tuple[int, ...], ...]:
        """For each parameter, the ops that compute its gradient, in program order."""
        return self._by_parameter([op.produces for op in self.ops])

    @property
    def resources(self) -> tuple[str, ...]:
        """Resources of all ops, in order of first appearance."""
        return tuple(dict.fromkeys(op.resource for op in self.ops))

    @property
    def compute_s(self) -> float:
        """Total duration of all ops."""
        return math.fsum(op.duration_s for op in self.ops)

    def _by_parameter(self, names_of_ops: Iterable[Iterable[str]]) -> tuple[tuple[int, ...], ...]:
        ops: list[list[int]] = [[] for _ in self.parameters]
        for i, names in enumerate(names_of_ops):
            for name in dict.fromkeys(names):
                ops[self.parameter_position[name]].append(i)
        return tuple(map(tuple, ops))


def bits(mask: int) -> bytes:
    """A set as one byte for each position, 1 or 0, up to its largest member."""
    return f"{mask:b}"[::-1].encode().translate(_TO_BITS)


def members(mask: int) -> list[int]:
    """The positions in a set, ascending."""
    return list(compress(count(), bits(mask)))


_TO_BITS = bytes.maketrans(b"01", b"\0\1")


def _check_values(parameters: Sequence[GraphParameter], ops: Sequence[GraphOp]) -> None:
    known_ops = {op.name for op in ops}
    known_parameters = {parameter.name for parameter in parameters}
    for op in ops:
        if not (math.isfinite(op.duration_s) and op.duration_s >= 0):
            raise InvalidUsage(
                f"the op {op.name!r} takes {op.duration_s} s; a duration is finite and not negative"
            )
        for verb, names, kind, known in (
            ("needs", op.inputs, "op", known_ops),
            ("reads", op.reads, "parameter", known_parameters),
            ("produces", op.produces, "parameter", known_parameters),
        ):
            for name in names:
                if name not in known:
                    raise InvalidUsage(
                        f"the op {op.name!r} {verb} the {kind} {name!r}, which the graph lacks"
                    )


def _behind_inputs(ops: Sequence[GraphOp]) -> tuple[GraphOp, ...]:
    """Topological order; among ops whose inputs are placed, the first listed one is next."""
    position = {op.name: i for i, op in enumerate(ops)}
    missing = [len(set(op.inputs)) for op in ops]
    users: list[list[int]] = [[] for _ in ops]
    for i, op in enumerate(ops):
        for name in set(op.inputs):
            users[position[name]].append(i)
    ready = [i for i in range(len(ops)) if not missing[i]]
    ordered = []
    while ready:
        i = heapq.heappop(ready)
        ordered.append(ops[i])
        for user in users[i]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, user)
    if len(ordered) < len(ops):
        circle = " -> ".join(map(repr, _circle(ops)))
        raise InvalidUsage(f"ops wait for each other: {circle} (each needs the next)")
    return tuple(ordered)


def _circle(ops: Sequence[GraphOp]) -> list[str]:
    """Names along a circle of inputs; the ops contain at least one."""
    left = {op.name: op for op in ops}
    while True:  # an op that waits for no remaining op is in no circle
        free = [name for name, op in left.items() if not any(i in left for i in op.inputs)]
        if not free:
            break
        for name in free:
            del left[name]
    at, seen = next(iter(left)), dict[str, int]()
    while at not in seen:
        seen[at] = len(seen)
        at = next(name for name in left[at].inputs if name in left)
    return [*list(seen)[seen[at] :], at]
