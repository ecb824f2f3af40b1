"""What is simulated: what a rank computes, what transfers cost, and in which order they go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from hvd_order import _core
from hvd_order.errors import InvalidUsage

__all__ = [
    "AllReduce",
    "Op",
    "Parameter",
    "ParameterServers",
    "Schedule",
    "Workload",
    "ddp",
    "named",
]

T = TypeVar("T")

PolicyName = Literal["priority", "arrival", "planned"]
AgreementName = Literal["leader", "negotiated", "planned"]
PullName = Literal["at_once", "next_step"]

_POLICIES = {
    "priority": _core.Policy.PRIORITY,
    "arrival": _core.Policy.ARRIVAL,
    "planned": _core.Policy.PLANNED,
}
_AGREEMENTS = {
    "leader": _core.AgreementKind.LEADER,
    "negotiated": _core.AgreementKind.NEGOTIATED,
    "planned": _core.AgreementKind.PLANNED,
}
_PULLS = {"at_once": True, "next_step": False}


def named(what: str, name: str, values: Mapping[str, T]) -> T:
    """The value of that name.

    Raises:
        InvalidUsage: there is none.
    """
    if name not in values:
        raise InvalidUsage(f"{what} is {name!r}; expected one of {', '.join(values)}")
    return values[name]


@dataclass(frozen=True)
class Parameter:
    """A parameter; its number is its place in the list, which is in consumption order.

    Attributes:
        size_bytes: of its gradient as it travels.
        update_s: of the optimizer, for this parameter.
        buffer: gradient buffer; only neighbours in one buffer share slices.
    """

    name: str
    size_bytes: int
    update_s: float = 0.0
    buffer: int = 0


@dataclass(frozen=True)
class Op:
    """A piece of computation of one step.

    Attributes:
        seconds: on the device.
        inputs: ops of the same step that have to end first.
        reads: parameters; it waits until the step before has updated them.
        produces: gradients; one is ready when all ops that produce it have ended.
        awaits: gradients of the same step, summed over all ranks (clipping by their norm).
        stream: where it runs; a stream runs one op at a time.
    """

    name: str
    seconds: float
    inputs: Sequence[int] = ()
    reads: Sequence[int] = ()
    produces: Sequence[int] = ()
    awaits: Sequence[int] = ()
    stream: int = 0


class Workload:
    """What one rank computes in a step: a graph of ops over parameters. Immutable."""

    def __init__(self, ops: Sequence[Op], parameters: Sequence[Parameter]) -> None:
        """Takes ops in program order.

        Raises:
            InvalidUsage: a negative time, an unknown number, a circle, or a parameter without
                gradient.
        """
        self.native = _core.SimulatedWorkload(
            [
                (o.name, o.seconds, list(o.inputs), list(o.reads), list(o.produces),
                 list(o.awaits), o.stream)
                for o in ops
            ],
            [(p.name, p.size_bytes, p.update_s, p.buffer) for p in parameters],
        )  # fmt: skip

    @classmethod
    def chain(
        cls,
        names: Sequence[str],
        forward_s: Sequence[float],
        backward_s: Sequence[float],
        size_bytes: Sequence[Sequence[int]],
        update_s_per_byte: float = 0.0,
    ) -> Workload:
        """Layers one after the other: forward in this order, backward in the opposite one.

        Args:
            size_bytes: of each layer's parameters; a layer may have none.
        """
        forward: list[Op] = []
        backward: list[Op] = []
        parameters: list[Parameter] = []
        count = len(names)
        for i, (name, forth, back, sizes) in enumerate(
            zip(names, forward_s, backward_s, size_bytes, strict=True)
        ):
            mine = range(len(parameters), len(parameters) + len(sizes))
            parameters += [
                Parameter(
                    name if len(sizes) == 1 else f"{name}.{k}", size, size * update_s_per_byte
                )
                for k, size in enumerate(sizes)
            ]
            forward.append(Op(f"{name} forward", forth, [i - 1] if i else [], reads=mine))
            inputs = [2 * count - 2 - i if i < count - 1 else count - 1]
            backward.append(Op(f"{name} backward", back, inputs, produces=mine))
        return cls([*forward, *reversed(backward)], parameters)

    @classmethod
    def _of(cls, native: _core.SimulatedWorkload) -> Workload:
        made = cls.__new__(cls)
        made.native = native
        return made

    @property
    def parameter_bytes(self) -> list[int]:
        """By parameter."""
        return self.native.parameter_bytes

    def layout(self, slice_bytes: int) -> _core.SliceLayout:
        """How the gradients are cut into slices; plans and records count these."""
        return self.native.layout(slice_bytes)

    def merged(self, groups: Sequence[Sequence[int]]) -> Workload:
        """The same computation with gradients that travel together (MG-WFBP, DDP's buckets).

        Args:
            groups: of parameters, each in one of them; a group becomes one parameter.
        """
        return self._of(self.native.merged([list(group) for group in groups]))


@dataclass(frozen=True)
class AllReduce:
    """What an all-reduce of one slice costs.

    Alone it takes ``latency_s + slice_cost_s + bytes * seconds_per_byte``. The latency passes
    beside the transfers of others; the rest occupies the link, which slices in flight share
    equally. Hockney, Parallel Computing 20, 1994.

    Attributes:
        sent_per_byte: bytes that leave each rank for each byte of gradient.
        lanes: how many slices the transport works on at a time, in the order of issue; 0 for all
            in flight. With 1 they follow each other, latency included, as on a stream of NCCL.
    """

    latency_s: float
    seconds_per_byte: float
    slice_cost_s: float = 0.0
    sent_per_byte: float = 1.0
    lanes: int = 0

    @classmethod
    def ring(cls, ranks: int, latency_s: float, bytes_per_s: float) -> AllReduce:
        """2 (n - 1) messages deep; each rank sends 2 (n - 1) / n of the bytes.

        Args:
            latency_s: of one message.
            bytes_per_s: of each rank's link, each way.
        """
        return cls._of(_core.ring_all_reduce(ranks, latency_s, bytes_per_s))

    @classmethod
    def tree(cls, ranks: int, latency_s: float, bytes_per_s: float) -> AllReduce:
        """Two binary trees: 2 log2(n) messages deep, as many bytes as a ring."""
        return cls._of(_core.tree_all_reduce(ranks, latency_s, bytes_per_s))

    @classmethod
    def _of(cls, cost: _core.AllReduceCost) -> AllReduce:
        return cls(
            cost.latency_s,
            cost.seconds_per_byte,
            cost.slice_cost_s,
            cost.sent_per_byte,
            cost.lanes,
        )

    def native(self, schedule: Schedule) -> _core.AllReduceCost:
        """For the extension; the schedule says nothing about the cost."""
        del schedule
        return _core.AllReduceCost(
            latency_s=self.latency_s,
            slice_cost_s=self.slice_cost_s,
            seconds_per_byte=self.seconds_per_byte,
            sent_per_byte=self.sent_per_byte,
            lanes=self.lanes,
        )


@dataclass(frozen=True)
class ParameterServers:
    """Slices are pushed to servers, updated there when all workers' have come, and pulled.

    Links are full duplex; flows share them max-min fairly. Workers push without agreement.

    Attributes:
        servers: how many; slices go to them in turn unless ``server_of`` says for each where.
        latency_s: of a push or pull, beside the transfers of others.
        worker_bytes_per_s, server_bytes_per_s: each way.
        update_s_per_byte, update_s_per_slice: a server's own work on a slice.
        pull: "at_once" as in P3, or with the worker's "next_step" as in TicTac.
        pull_policy: order of a worker's pulls; "planned" takes ``pull_plan``, a list of all slices.
        pull_credit_bytes: in flight to a worker; None for as much as the schedule allows pushes.
    """

    servers: int
    worker_bytes_per_s: float
    server_bytes_per_s: float
    latency_s: float = 0.0
    update_s_per_byte: float = 0.0
    update_s_per_slice: float = 0.0
    pull: PullName = "at_once"
    pull_policy: PolicyName = "priority"
    pull_credit_bytes: int | None = None
    pull_plan: Sequence[int] = ()
    server_of: Sequence[int] = ()

    def native(self, schedule: Schedule) -> _core.ServerNetwork:
        """For the extension."""
        credit = self.pull_credit_bytes
        return _core.ServerNetwork(
            servers=self.servers,
            latency_s=self.latency_s,
            worker_bytes_per_s=self.worker_bytes_per_s,
            server_bytes_per_s=self.server_bytes_per_s,
            update_seconds_per_byte=self.update_s_per_byte,
            update_seconds_per_slice=self.update_s_per_slice,
            pull_at_once=named("pull", self.pull, _PULLS),
            pull_policy=named("pull_policy", self.pull_policy, _POLICIES),
            pull_credit_bytes=schedule.credit_bytes if credit is None else credit,
            pull_plan=list(self.pull_plan),
            server_of=list(self.server_of),
        )


@dataclass(frozen=True)
class Schedule:
    """In which order and in what pieces gradients travel.

    Attributes:
        slice_bytes: unit of transfer.
        credit_bytes: how much may be in flight.
        policy: which ready slice goes first.
        agreement: how ranks come to one order; "planned" goes with the policy of that name.
        plan: all slices of ``Workload.layout`` in the order to issue them, for "planned".
        control_latency_s: of a message of the agreement.
        reservation_lead_s: no large slice begins so long before the first gradient; 0 for
            never. What the engine takes: ``hvd_order.plan.link.cut.reservation_lead_s``.
        cross_step: whether the next step begins before all gradients have arrived.
    """

    slice_bytes: int = 4 * 2**20
    credit_bytes: int = 16 * 2**20
    policy: PolicyName = "priority"
    agreement: AgreementName = "leader"
    plan: Sequence[int] = ()
    control_latency_s: float = 0.0
    reservation_lead_s: float = 0.0
    cross_step: bool = True

    def native_policy(self) -> _core.Policy:
        """For the extension."""
        return named("policy", self.policy, _POLICIES)

    def native_agreement(self) -> _core.AgreementKind:
        """For the extension."""
        return named("agreement", self.agreement, _AGREEMENTS)


def ddp(
    workload: Workload, bucket_bytes: int = 25 * 2**20, first_bytes: int | None = None
) -> tuple[Workload, Schedule]:
    """DistributedDataParallel: buckets in the order of backward, all awaited at its end.

    Args:
        first_bytes: of the first bucket; None for DDP's default of 1 MiB, which applies when its
            user names no bucket size.

    Returns:
        The workload in buckets, and the schedule to simulate it with.
    """
    first = 2**20 if first_bytes is None else first_bytes
    buckets = workload.merged(workload.native.buckets(first, bucket_bytes))
    # A layout pads tensors to 16 bytes.
    largest = max((size + 15) // 16 * 16 for size in [64, *buckets.parameter_bytes])
    whole = Schedule(largest, sum(buckets.parameter_bytes) + 16 * largest, "planned", "planned",
                     cross_step=False)  # fmt: skip
    return buckets, replace(whole, plan=range(len(buckets.parameter_bytes)))
