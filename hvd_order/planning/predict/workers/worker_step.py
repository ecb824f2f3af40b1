"""A worker's step with pulls and pushes, from a profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hvd_order._native import _core
from hvd_order.base.errors import InvalidUsage
from hvd_order.base.link.link_model import LinkModel
from hvd_order.base.link.slice_settings import best_settings
from hvd_order.planning.files.profile import Profile
from hvd_order.planning.graph.graph import Graph, GraphParameter
from hvd_order.planning.graph.priorities import Priorities
from hvd_order.planning.predict.workload import consumption_order

__all__ = ["Placement", "WorkerOp", "WorkerStep", "usual_slice_bytes"]

Placement = Literal["by_size", "in_turn"]

_KINDS = {
    "compute": _core.SampledKind.COMPUTE,
    "pull": _core.SampledKind.PULL,
    "push": _core.SampledKind.PUSH,
}


_ALIGNMENT = 16  # bytes; SliceLayout's least


@dataclass(frozen=True)
class WorkerOp:
    """A computation of a step, or the transfer of one tensor.

    Attributes:
        kind: "compute", "pull" or "push".
        inputs: numbers of the ops that have to end before.
        stream: of a computation.
        tensor, priority: of a transfer; the smaller priority is the more urgent.
    """

    name: str
    kind: str
    inputs: list[int]
    stream: int = 0
    tensor: int = 0
    priority: int = 0


@dataclass(frozen=True)
class _WirePiece:
    """What travels as one: a tensor, or a slice with several tensors or a part of one."""

    name: str
    size_bytes: int
    parameters: tuple[str, ...]


class WorkerStep:
    """Computations of a step, measured several times, and the transfers around them.

    A piece is pulled before the first reader of a parameter in it, and pushed behind the producers
    of all its gradients. The optimizer's ops are left out: servers update.

    Attributes:
        tensor_bytes, tensor_names: what travels, each way, piece by piece, in order of urgency.
        ops: all pulls, the computations in program order, all pushes.
        op_seconds: by measured step and op; of a transfer 0.
        samples: number of measured steps.
        compute_s: computation of each measured step.
        parameters: number of parameters that travel.
        graph: of the ops and parameters.
    """

    def __init__(
        self,
        graph: Graph,
        seconds: Sequence[Sequence[float]],
        *,
        priorities: Priorities | None = None,
        slice_bytes: int | None = None,
        fetch_orders: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Takes the graph and, by measured step and op of the graph, the durations.

        Args:
            priorities: order of the transfers for an enforced order; None: consumption order.
            slice_bytes: parameters travel in slices of this size, which hvd_order's `SliceLayout`
                cuts; None: each as a whole.
            fetch_orders: of each measured step, numbers of the graph's parameters in the order in
                which the worker asks for them, if they travel as a whole; None: consumption order.

        Raises:
            InvalidUsage: no gradient travels, there is no measured step, slices are too small, or
                there are not as many orders as measured steps.
        """
        names = consumption_order(graph)
        if not names:
            raise InvalidUsage("no parameter of the profile has a gradient, so nothing travels")
        ranked = names if priorities is None else sorted(names, key=priorities.__getitem__)
        sizes = {p.name: p.size_bytes for p in graph.parameters}
        pieces = _pieces(ranked, sizes, slice_bytes)
        self.tensor_bytes = [piece.size_bytes for piece in pieces]
        self.parameters = len(names)
        self._made = _in_order(pieces, [p.name for p in graph.parameters])
        self.tensor_names = [piece.name for piece in pieces]
        self.ops = ops = list[WorkerOp]()
        pulls: dict[str, list[int]] = {name: [] for name in names}
        for i, piece in enumerate(pieces):
            for name in piece.parameters:
                pulls[name].append(len(ops))
            ops.append(WorkerOp(f"pull {piece.name}", "pull", [], 0, i, i))
        streams = {name: i for i, name in enumerate(graph.resources)}
        place: dict[str, int] = {}
        self._kept = [i for i, op in enumerate(graph.ops) if op.phase != "update" or op.produces]
        producers: dict[str, list[int]] = {name: [] for name in names}
        for i in self._kept:
            op = graph.ops[i]
            inputs = [place[name] for name in op.inputs if name in place]
            inputs += [pull for name in op.reads if name in pulls for pull in pulls[name]]
            place[op.name] = len(ops)
            for name in op.produces:
                producers[name].append(len(ops))
            ops.append(WorkerOp(op.name, "compute", inputs, streams[op.resource]))
        for i, piece in enumerate(pieces):
            behind = [op for name in piece.parameters for op in producers[name]]
            ops.append(WorkerOp(f"push {piece.name}", "push", behind, 0, i, i))
        rows = []
        for step in seconds:
            row = [0.0] * len(ops)
            for i in self._kept:
                row[place[graph.ops[i].name]] = step[i]
            rows.append(row)
        self.op_seconds = rows
        self.samples = len(rows)
        self.compute_s = [sum(row) for row in rows]
        self.graph, self._seconds = graph, seconds
        self._priorities, self._slice_bytes, self._fetch_orders = (
            priorities,
            slice_bytes,
            fetch_orders,
        )
        self.native = _core.SampledStep(
            [(o.name, _KINDS[o.kind], o.inputs, o.stream, o.tensor, o.priority) for o in ops],
            self.tensor_bytes,
            rows,
            [
                _in_order(pieces, [graph.parameters[number].name for number in order])
                for order in fetch_orders or ()
            ],
        )

    def with_exchange_time(self, seconds: float) -> WorkerStep:
        """The same step, in which each parameter that travels takes the worker so much longer.

        One half is spent before the parameter's first reader, the other behind its last producer.
        """
        extra = [0.0] * len(self.graph.ops)
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        for i in self._kept:
            op = self.graph.ops[i]
            for name in op.reads:
                first.setdefault(name, i)
            last.update(dict.fromkeys(op.produces, i))
        for name, i in last.items():
            extra[i] += seconds / 2
            extra[first.get(name, i)] += seconds / 2
        longer = [[s + e for s, e in zip(step, extra, strict=True)] for step in self._seconds]
        return WorkerStep(
            self.graph, longer, priorities=self._priorities, slice_bytes=self._slice_bytes,
            fetch_orders=self._fetch_orders,
        )  # fmt: skip

    def in_slices(self, slice_bytes: int) -> WorkerStep:
        """The same step, whose parameters travel in slices of this size.

        Raises:
            InvalidUsage: slices are too small.
        """
        if slice_bytes == self._slice_bytes:
            return self
        return WorkerStep(
            self.graph, self._seconds, priorities=self._priorities, slice_bytes=slice_bytes,
            fetch_orders=self._fetch_orders,
        )  # fmt: skip

    @classmethod
    def from_profile(
        cls,
        profile: Profile,
        *,
        priorities: Priorities | None = None,
        slice_bytes: int | None = None,
        fetch_orders: Sequence[Sequence[int]] | None = None,
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
            graph, steps, priorities=priorities, slice_bytes=slice_bytes, fetch_orders=fetch_orders
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


def _in_order(pieces: Sequence[_WirePiece], names: Sequence[str]) -> list[int]:
    """Numbers of the pieces, by the place of their first parameter."""
    place = {name: i for i, name in enumerate(names)}
    return sorted(range(len(pieces)), key=lambda i: place[pieces[i].parameters[0]])


def usual_slice_bytes(
    parameters: Sequence[GraphParameter], bytes_per_s: float, latency_s: float, pushers: int = 1
) -> int:
    """The slice size that hvd_order chooses for a model on a link, before any trial.

    Args:
        pushers: workers of a synchronous job with servers, which push a slice at the same time.
    """
    total = sum(parameter.size_bytes for parameter in parameters)
    link = LinkModel(latency_s, 0.0, 1 / bytes_per_s)
    return best_settings(link, total, pushers=pushers).slice_bytes


def _pieces(
    names: Sequence[str], sizes: Mapping[str, int], slice_bytes: int | None
) -> list[_WirePiece]:
    """What travels as one, in the order of the names."""
    if slice_bytes is None:
        return [_WirePiece(name, sizes[name], (name,)) for name in names]
    aligned = [(name, -(-max(sizes[name], 1) // _ALIGNMENT) * _ALIGNMENT, 0) for name in names]
    layout = _core.SliceLayout(aligned, slice_bytes, small_front=True)
    return [
        _WirePiece(
            layout.slice_name(i), each.size_bytes, tuple(names[t] for t in layout.tensors_of(i))
        )
        for i, each in enumerate(layout.slices)
    ]
