"""Input of a simulation: computation of a rank, cost of transfers, and their schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from hvd_order._native import _core
from hvd_order.base.errors import InvalidUsage
from hvd_order.base.link.slice_settings import SliceSettings

__all__ = [
    "AllReduceScenario",
    "ScenarioOp",
    "ScenarioParameter",
    "StepWorkload",
    "TransferSchedule",
    "ddp",
    "named",
]

T = TypeVar("T")

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


def named(what: str, name: str, values: Mapping[str, T]) -> T:
    """Looks up a value by name.

    Raises:
        InvalidUsage: the name is unknown.
    """
    if name not in values:
        raise InvalidUsage(f"{what} is {name!r}; expected one of {', '.join(values)}")
    return values[name]


@dataclass(frozen=True)
class ScenarioParameter:
    """A parameter; its number is its place in the list, which is in consumption order.

    Attributes:
        size_bytes: size of its gradient as sent.
        update_s: time of the optimizer for this parameter.
        buffer: gradient buffer; only neighbours in one buffer share slices.
    """

    name: str
    size_bytes: int
    update_s: float = 0.0
    buffer: int = 0


@dataclass(frozen=True)
class ScenarioOp:
    """One operator of a step.

    Attributes:
        seconds: duration on the device.
        inputs: ops of the same step that have to end before.
        reads: parameters that the op reads once the previous step has updated them.
        produces: gradients; a gradient is ready when all ops that produce it have ended.
        awaits: sums of gradients of the same step that the op needs (clipping by norm).
        stream: stream of the op; a stream runs one op at a time.
    """

    name: str
    seconds: float
    inputs: Sequence[int] = ()
    reads: Sequence[int] = ()
    produces: Sequence[int] = ()
    awaits: Sequence[int] = ()
    stream: int = 0


class StepWorkload:
    """Computation of one rank in a step: a graph of ops over parameters. Immutable."""

    def __init__(self, ops: Sequence[ScenarioOp], parameters: Sequence[ScenarioParameter]) -> None:
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
    ) -> StepWorkload:
        """A chain of layers: forward in this order, backward in reverse.

        Args:
            size_bytes: sizes of each layer's parameters; a layer may have none.
        """
        forward: list[ScenarioOp] = []
        backward: list[ScenarioOp] = []
        parameters: list[ScenarioParameter] = []
        count = len(names)
        for i, (name, forth, back, sizes) in enumerate(
            zip(names, forward_s, backward_s, size_bytes, strict=True)
        ):
            mine = range(len(parameters), len(parameters) + len(sizes))
            parameters += [
                ScenarioParameter(
                    name if len(sizes) == 1 else f"{name}.{k}", size, size * update_s_per_byte
                )
                for k, size in enumerate(sizes)
            ]
            forward.append(ScenarioOp(f"{name} forward", forth, [i - 1] if i else [], reads=mine))
            inputs = [2 * count - 2 - i if i < count - 1 else count - 1]
            backward.append(ScenarioOp(f"{name} backward", back, inputs, produces=mine))
        return cls([*forward, *reversed(backward)], parameters)

    @classmethod
    def _of(cls, native: _core.SimulatedWorkload) -> StepWorkload:
        made = cls.__new__(cls)
        made.native = native
        return made

    @property
    def parameter_bytes(self) -> list[int]:
        """Size of each parameter's gradient."""
        return self.native.parameter_bytes

    def layout(self, slice_bytes: int, split: bool = False) -> _core.SliceLayout:
        """Layout of the gradients in slices; plans and records use its slice numbers.

        Args:
            split: each slice is a reduce-scatter and an all-gather, and there is one of squares.
        """
        return self.native.layout(slice_bytes, split)

    def merged(self, groups: Sequence[Sequence[int]]) -> StepWorkload:
        """Merges gradients that travel together (MG-WFBP, DDP's buckets).

        Args:
            groups: partition of the parameters; a group becomes one parameter.
        """
        return self._of(self.native.merged([list(group) for group in groups]))


@dataclass(frozen=True)
class AllReduceScenario:
    """Cost of an all-reduce of one slice.

    Alone it takes ``latency_s + slice_cost_s + bytes * seconds_per_byte``. The latency overlaps
    with other transfers. The rest occupies the link, which slices in flight share equally.
    Hockney, Parallel Computing 20, 1994. Either half of a split all-reduce has half of the latency
    and of the bytes, and the whole cost of a slice (csrc/planning/network/network.h).

    Attributes:
        sent_per_byte: bytes that each rank sends for each byte of gradient.
        lanes: slices that the transport transfers at a time, in the order of issue; 0 for all in
            flight. With 1 slices run one after the other, latency included, as on an NCCL stream.
    """

    latency_s: float
    seconds_per_byte: float
    slice_cost_s: float = 0.0
    sent_per_byte: float = 1.0
    lanes: int = 0

    @classmethod
    def ring(cls, ranks: int, latency_s: float, bytes_per_s: float) -> AllReduceScenario:
        """2 (n - 1) messages deep; each rank sends 2 (n - 1) / n of the bytes.

        Args:
            latency_s: latency of one message.
            bytes_per_s: bandwidth of each rank's link, each way.
        """
        return cls._of(_core.ring_all_reduce(ranks, latency_s, bytes_per_s))

    @classmethod
    def tree(cls, ranks: int, latency_s: float, bytes_per_s: float) -> AllReduceScenario:
        """Two binary trees: 2 log2(n) messages deep, as many bytes as a ring."""
        return cls._of(_core.tree_all_reduce(ranks, latency_s, bytes_per_s))

    @classmethod
    def _of(cls, cost: _core.AllReduceCost) -> AllReduceScenario:
        return cls(
            cost.latency_s,
            cost.seconds_per_byte,
            cost.slice_cost_s,
            cost.sent_per_byte,
            cost.lanes,
        )

    def native(self) -> _core.AllReduceCost:
        """Converts to the extension's type."""
        return _core.AllReduceCost(
            latency_s=self.latency_s,
            slice_cost_s=self.slice_cost_s,
            seconds_per_byte=self.seconds_per_byte,
            sent_per_byte=self.sent_per_byte,
            lanes=self.lanes,
        )


@dataclass(frozen=True)
class TransferSchedule(SliceSettings):
    """Slice settings with the order of gradients; agreement "planned" requires that policy.

    ``split`` is for steps that are clipped.

    Attributes:
        plan: all slices of ``StepWorkload.layout`` in the order to issue them, for "planned".
        control_latency_s: latency of a message of the agreement.
        reservation_lead_s: duration of the link reservation; 0 for none. The engine uses
            ``hvd_order.base.link.slice_settings.reservation_lead_s``.
        control_send_s: time of a message's sender for it; a rank sends one after the other.
        fan_out: most children of a rank in the tree along which the ranks agree.
    """

    slice_bytes: int = 4 * 2**20
    credit_bytes: int = 16 * 2**20
    plan: Sequence[int] = ()
    control_latency_s: float = 0.0
    reservation_lead_s: float = 0.0
    control_send_s: float = 0.0
    fan_out: int = 4

    def native_policy(self) -> _core.Policy:
        """Converts to the extension's type."""
        return named("policy", self.policy, _POLICIES)

    def native_agreement(self) -> _core.AgreementKind:
        """Converts to the extension's type."""
        return named("agreement", self.agreement, _AGREEMENTS)


def ddp(
    workload: StepWorkload, bucket_bytes: int = 25 * 2**20, first_bytes: int | None = None
) -> tuple[StepWorkload, TransferSchedule]:
    """DistributedDataParallel: buckets in the order of backward, all awaited at its end.

    Args:
        first_bytes: size of the first bucket; None for DDP's default of 1 MiB, used when the
            user sets no bucket size.

    Returns:
        The workload in buckets, and the schedule to simulate it with.
    """
    first = 2**20 if first_bytes is None else first_bytes
    buckets = workload.merged(workload.native.buckets(first, bucket_bytes))
    # A layout pads tensors to 16 bytes.
    largest = max((size + 15) // 16 * 16 for size in [64, *buckets.parameter_bytes])
    credit = sum(buckets.parameter_bytes) + 16 * largest
    whole = TransferSchedule(largest, credit, "planned", "planned", cross_iteration=False)
    return buckets, replace(whole, plan=range(len(buckets.parameter_bytes)))
