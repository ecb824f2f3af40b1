"""Simulates training steps with the scheduler and agreements that real runs use.

A ``Workload`` is what one rank computes, a network (``AllReduce`` or ``ParameterServers``) what
transfers cost, a ``Schedule`` in which order and in what pieces they go; ``simulate`` puts them
together. The model and what it leaves out: docs/simulator.md.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from hvd_order import _core

__all__ = [
    "AllReduce",
    "Op",
    "OpTimes",
    "Parameter",
    "ParameterServers",
    "Schedule",
    "Simulated",
    "SliceTimes",
    "UpdateTimes",
    "Workload",
    "ddp",
    "simulate",
]

T = TypeVar("T")

PolicyName = Literal["priority", "arrival", "planned"]
AgreementName = Literal["leader", "negotiated", "planned"]

_POLICIES: dict[PolicyName, _core.Policy] = {
    "priority": _core.Policy.PRIORITY,
    "arrival": _core.Policy.ARRIVAL,
    "planned": _core.Policy.PLANNED,
}
_AGREEMENTS: dict[AgreementName, _core.AgreementKind] = {
    "leader": _core.AgreementKind.LEADER,
    "negotiated": _core.AgreementKind.NEGOTIATED,
    "planned": _core.AgreementKind.PLANNED,
}


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
    pull: Literal["at_once", "next_step"] = "at_once"
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
            pull_at_once=self.pull == "at_once",
            pull_policy=_POLICIES[self.pull_policy],
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
        hold_lead_s: so long before the first gradient no large slice begins any more; 0 for never.
            What the engine takes: ``hvd_order.plan.cut.hold_lead_s``.
        cross_step: whether the next step begins before all gradients have arrived.
    """

    slice_bytes: int = 4 * 2**20
    credit_bytes: int = 16 * 2**20
    policy: PolicyName = "priority"
    agreement: AgreementName = "leader"
    plan: Sequence[int] = ()
    control_latency_s: float = 0.0
    hold_lead_s: float = 0.0
    cross_step: bool = True


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


@dataclass(frozen=True)
class OpTimes:
    """An op's run; seconds since the start of the simulation.

    Attributes:
        could_start_s: when its inputs had ended and its stream was free.
        start_s: when what it reads had arrived and was updated.
    """

    name: str
    could_start_s: float
    start_s: float
    end_s: float

    @property
    def wait_s(self) -> float:
        """For parameters, updates included."""
        return self.start_s - self.could_start_s


@dataclass(frozen=True)
class UpdateTimes:
    """An update's run; ``parameter`` is None for all of them at the end of a step."""

    stream: int
    parameter: int | None
    start_s: float
    end_s: float


@dataclass(frozen=True)
class SliceTimes:
    """A slice's journey in one step.

    Attributes:
        ready_s: where the order is decided.
        issued_s: on all ranks.
        started_s: on the link, after its latency and behind what is ahead of it.
        summed_s: over all ranks.
        finished_s: everywhere: summed, or pulled from the server.
    """

    name: str
    size_bytes: int
    ready_s: float
    issued_s: float
    started_s: float
    summed_s: float
    finished_s: float


@dataclass(frozen=True)
class Simulated:
    """What happened; times in seconds since the start.

    The first step waits for no parameter, so it is shorter than those that follow.

    Attributes:
        step_s: by step, from its start to the start of the next, of the slowest rank.
        end_s: when the last gradient had arrived.
        steps, recorded: as asked for.
    """

    step_s: list[float]
    end_s: float
    steps: int
    recorded: int
    _workload: Workload = field(repr=False)
    _layout: _core.SliceLayout = field(repr=False)
    _native: _core.SimulationResult = field(repr=False)

    @property
    def steady_s(self) -> float:
        """Step time in the steady state: the mean over the later half of the steps."""
        return statistics.fmean(self.step_s[len(self.step_s) // 2 :])

    @property
    def sent_bytes(self) -> float:
        """That left each rank, a step."""
        return self._native.sent_bytes / self.steps

    def compute_busy_s(self, device: int = 0) -> list[float]:
        """By stream: computation and updates, a step."""
        return [busy / self.steps for busy in self._native.devices[device].busy_s]

    def link_busy_s(self) -> dict[str, float]:
        """By link: how long it carried something, a step."""
        return {link.name: link.busy_s / self.steps for link in self._native.links}

    def link_busy(self) -> dict[str, list[tuple[float, float]]]:
        """By link: (begin, end) of the times when it carried something in the recorded steps."""
        return {link.name: link.busy for link in self._native.links}

    def ranks(self) -> list[tuple[float, int]]:
        """By device: slowness, and how many ranks it stands for."""
        return [(device.slowness, device.ranks) for device in self._native.devices]

    def step_starts_s(self, device: int = 0) -> list[float]:
        """When each step began; the last one is the end of the last step."""
        return self._native.devices[device].step_starts_s

    def ops(self, device: int = 0) -> list[list[OpTimes]]:
        """By recorded step and op."""
        names = self._workload.native.op_names
        rows = _rows(self._native.devices[device].ops, len(names))
        return [
            [OpTimes(name, *times) for name, times in zip(names, row, strict=True)] for row in rows
        ]

    def updates(self, device: int = 0) -> list[UpdateTimes]:
        """In recorded steps, in order of their ends."""
        return [UpdateTimes(*times) for times in self._native.devices[device].updates]

    def slices(self) -> list[list[SliceTimes]]:
        """By recorded step and slice; the last step's finish after its end."""
        cut = self._layout.slices
        names = [self._layout.slice_name(i) for i in range(len(cut))]
        return [
            [
                SliceTimes(name, piece.size_bytes, *times)
                for name, piece, times in zip(names, cut, row, strict=True)
            ]
            for row in _rows(self._native.slices, len(cut))
        ]


def _rows(flat: list[T], width: int) -> list[list[T]]:
    return [flat[at : at + width] for at in range(0, len(flat), width)] if width else []


def simulate(
    workload: Workload,
    network: AllReduce | ParameterServers,
    schedule: Schedule | None = None,
    *,
    ranks: int | Sequence[float] = 2,
    steps: int = 10,
    recorded: int = 0,
    order: Literal["program", "ready"] = "program",
    every_rank: bool = False,
) -> Simulated:
    """Trains for some steps in virtual time. The same input gives the same result, to the bit.

    Args:
        schedule: None for the defaults of ``Schedule``.
        ranks: how many of equal speed, or for each by how much its times are to be multiplied.
        recorded: of how many steps, the last ones, to keep times of ops and slices.
        order: whether a stream runs its ops as listed, waiting for each (eager frameworks), or the
            first listed of those that could run (dataflow executors).
        every_rank: simulate also those ranks that do the same as another at the same time.

    Raises:
        InvalidUsage: the scenario cannot be, or it comes to a standstill; the message names the op
            and the slice that wait.
    """
    schedule = schedule or Schedule()
    native = _core.simulate(
        workload.native,
        network.native(schedule),
        slowness=[1.0] * ranks if isinstance(ranks, int) else list(ranks),
        slice_bytes=schedule.slice_bytes,
        credit_bytes=schedule.credit_bytes,
        policy=_POLICIES[schedule.policy],
        agreement=_AGREEMENTS[schedule.agreement],
        plan=list(schedule.plan),
        control_latency_s=schedule.control_latency_s,
        hold_lead_s=schedule.hold_lead_s,
        program_order=order == "program",
        cross_step=schedule.cross_step,
        every_rank=every_rank,
        steps=steps,
        recorded=recorded,
    )
    layout = workload.layout(schedule.slice_bytes)
    return Simulated(native.step_s, native.end_s, steps, recorded, workload, layout, native)
