"""A worker's step with pulls and pushes, from a profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hvd_order import _core
from hvd_order.errors import InvalidUsage
from hvd_order.plan.files.profile import Profile
from hvd_order.plan.graph.graph import Graph
from hvd_order.plan.graph.priorities import Priorities
from hvd_order.predict.workload import consumption_order

__all__ = ["Placement", "WorkerStep"]

Placement = Literal["by_size", "in_turn"]

_KINDS = {
    "compute": _core.SampledKind.COMPUTE,
    "pull": _core.SampledKind.PULL,
    "push": _core.SampledKind.PUSH,
}


@dataclass(frozen=True)
class _Op:
    name: str
    kind: str
    inputs: list[int]
    stream: int = 0
    tensor: int = 0
    priority: int = 0


class WorkerStep:
    """Computations of a step, measured several times, and the transfers around them.

    A parameter is pulled before its first reader and its gradient is pushed behind its producers.
    The optimizer's ops are left out: servers update.

    Attributes:
        tensor_bytes: what travels, each way, piece by piece, in consumption order.
        samples: number of measured steps.
        compute_s: computation of each measured step.
    """

    def __init__(
        self,
        graph: Graph,
        seconds: Sequence[Sequence[float]],
        *,
        priorities: Priorities | None = None,
        slice_bytes: int | None = None,
        fetch_order: Sequence[str] | None = None,
    ) -> None:
        """Takes the graph and, by measured step and op of the graph, the durations.

        Args:
            priorities: order of the transfers for an enforced order; None: consumption order.
            slice_bytes: largest piece in which a tensor travels; None: tensors travel as a whole.
            fetch_order: names of the parameters in the order in which a worker asks for them; None:
                consumption order.

        Raises:
            InvalidUsage: no gradient travels, or there is no measured step.
        """
        names = consumption_order(graph)
        if not names:
            raise InvalidUsage("no parameter of the profile has a gradient, so nothing travels")
        if slice_bytes is not None and slice_bytes < 1:
            raise InvalidUsage(f"slices of {slice_bytes} bytes; at least 1 is needed")
        ranked = names if priorities is None else sorted(names, key=priorities.__getitem__)
        urgency = {name: i for i, name in enumerate(ranked)}
        sizes = {p.name: p.size_bytes for p in graph.parameters}
        self.tensor_bytes: list[int] = []
        pieces: dict[str, list[int]] = {}
        for name in names:
            first = len(self.tensor_bytes)
            self.tensor_bytes += _cut(sizes[name], slice_bytes)
            pieces[name] = list(range(first, len(self.tensor_bytes)))
        self._made = [piece for p in graph.parameters for piece in pieces.get(p.name, ())]
        ops: list[_Op] = []
        pulls: dict[str, list[int]] = {name: [] for name in names}
        for name in fetch_order or names:
            for i, tensor in enumerate(pieces.get(name, ())):
                pulls[name].append(len(ops))
                ops.append(_Op(f"pull {name}[{i}]", "pull", [], 0, tensor, urgency[name]))
        streams = {name: i for i, name in enumerate(graph.resources)}
        place: dict[str, int] = {}
        kept = [i for i, op in enumerate(graph.ops) if op.phase != "update" or op.produces]
        producers: dict[str, list[int]] = {name: [] for name in names}
        for i in kept:
            op = graph.ops[i]
            inputs = [place[name] for name in op.inputs if name in place]
            inputs += [pull for name in op.reads if name in pulls for pull in pulls[name]]
            place[op.name] = len(ops)
            for name in op.produces:
                producers[name].append(len(ops))
            ops.append(_Op(op.name, "compute", inputs, streams[op.resource]))
        firsts = [place[graph.ops[i].name] for i in kept]
        for name in names:
            for tensor in pieces[name]:
                ops.append(_Op(f"push {name}", "push", producers[name], 0, tensor, urgency[name]))
        rows = []
        for step in seconds:
            row = [0.0] * len(ops)
            for at, i in zip(firsts, kept, strict=True):
                row[at] = step[i]
            rows.append(row)
        self.samples = len(rows)
        self.compute_s = [sum(row) for row in rows]
        self.native = _core.SampledStep(
            [(o.name, _KINDS[o.kind], o.inputs, o.stream, o.tensor, o.priority) for o in ops],
            self.tensor_bytes,
            rows,
        )

    @classmethod
    def from_profile(
        cls,
        profile: Profile,
        *,
        priorities: Priorities | None = None,
        slice_bytes: int | None = None,
        fetch_order: Sequence[str] | None = None,
    ) -> WorkerStep:
        """The step of a profile, with its measured steps; arguments as of the class.

        Raises:
            InvalidUsage: the profile holds no single steps, or they do not vary.
        """
        graph = profile.graph("median")
        runs = [profile.timings[op.name].seconds for op in graph.ops]
        if not all(runs):
            raise InvalidUsage(
                "the profile holds no durations of single steps, which the throughput of several "
                "workers depends on; record it again with hvd-order profile"
            )
        if all(len(set(each)) == 1 for each in runs):
            raise InvalidUsage(
                "all measured steps of the profile take the same time, so simulated workers would "
                "lock step and the prediction be wrong by up to 2 times; record more steps "
                "(hvd-order profile --steps 50)"
            )
        steps = list(zip(*runs, strict=True))
        return cls(
            graph, steps, priorities=priorities, slice_bytes=slice_bytes, fetch_order=fetch_order
        )

    def on_servers(self, servers: int, placement: Placement = "by_size") -> list[int]:
        """Gives each piece to a server.

        Args:
            placement: "by_size": to the one with the fewest bytes so far, the largest piece first
                (hvd_order); "in_turn": one after the other, in the order of the graph's parameters
                (TensorFlow, in the order in which variables are made).

        Returns:
            The server of each piece.
        """
        if placement == "in_turn":
            turn = {tensor: i % servers for i, tensor in enumerate(self._made)}
            return [turn[tensor] for tensor in range(len(self.tensor_bytes))]
        loads = [0] * servers
        found = [0] * len(self.tensor_bytes)
        by_size = sorted(range(len(found)), key=lambda i: (-self.tensor_bytes[i], i))
        for tensor in by_size:
            server = min(range(servers), key=loads.__getitem__)
            found[tensor] = server
            loads[server] += self.tensor_bytes[tensor]
        return found


def _cut(size: int, slice_bytes: int | None) -> list[int]:
    """Sizes of a tensor's pieces: as few as possible, and alike."""
    if slice_bytes is None or size <= slice_bytes:
        return [size]
    count = -(-size // slice_bytes)
    return [size // count + (i < size % count) for i in range(count)]
