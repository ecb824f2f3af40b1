"""Results of a simulation: steps, ops, updates, slices and links, in seconds since start."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TypeVar

from hvd_order._native import _core
from hvd_order.planning.predict.scenario import StepWorkload

__all__ = ["OpTimes", "Simulated", "SimulatedAgreement", "SimulatedUpdate", "SliceTimes"]

T = TypeVar("T")


@dataclass(frozen=True)
class OpTimes:
    """Times of one op in seconds since the start of the simulation.

    Attributes:
        could_start_s: time at which its inputs had ended and its stream was free.
        start_s: time at which the parameters that it reads were updated.
    """

    name: str
    could_start_s: float
    start_s: float
    end_s: float

    @property
    def wait_s(self) -> float:
        """Time that the op waited for parameters, including updates."""
        return self.start_s - self.could_start_s


@dataclass(frozen=True)
class SimulatedUpdate:
    """Times of one update; ``parameter`` None means all parameters at the end of a step."""

    stream: int
    parameter: int | None
    start_s: float
    end_s: float


@dataclass(frozen=True)
class SliceTimes:
    """Times of one slice in one step; of a split all-reduce each half is one.

    Attributes:
        name: as in ``SliceLayout.slice_name``: halves are "sum of ..." and "parts of ...".
        ready_s: time of readiness where the order is decided.
        issued_s: time at which all ranks had issued it.
        started_s: start on the link, after its latency and the slices ahead of it.
        finished_s: time at which all ranks had the sum; with servers, worker 0 the parameter.
    """

    name: str
    size_bytes: int
    ready_s: float
    issued_s: float
    started_s: float
    finished_s: float


@dataclass(frozen=True)
class SimulatedAgreement:
    """Messages of one rank's half of the order agreement in a step, and the slices in them."""

    sent_messages: float
    sent_slices: float
    received_messages: float
    received_slices: float


@dataclass(frozen=True)
class Simulated:
    """Result of a simulation; times in seconds since the start.

    The first step waits for no parameter, so it is shorter than those that follow.

    Attributes:
        step_s: time of each step from its start to the next, on the slowest rank.
        end_s: arrival of the last gradient.
        steps, recorded: the arguments of ``simulate``.
    """

    step_s: list[float]
    end_s: float
    steps: int
    recorded: int
    _workload: StepWorkload = field(repr=False)
    _layout: _core.SliceLayout = field(repr=False)
    _native: _core.SimulationResult = field(repr=False)

    @property
    def steady_s(self) -> float:
        """Step time in the steady state: the mean over the later half of the steps."""
        return statistics.fmean(self.step_s[len(self.step_s) // 2 :])

    @property
    def sent_bytes(self) -> float:
        """Bytes that each rank sent in a step."""
        return self._native.sent_bytes / self.steps

    def agreement(self) -> list[SimulatedAgreement]:
        """Messages in a step of each simulated half; by rank if all are (``every_agreement``)."""
        return [
            SimulatedAgreement(*(count / self.steps for count in half))
            for half in self._native.agreement
        ]

    def compute_busy_s(self, device: int = 0) -> list[float]:
        """Time of computation and updates in a step, by stream."""
        return [busy / self.steps for busy in self._native.devices[device].busy_s]

    def link_busy_s(self) -> float:
        """Busy time of the link in a step."""
        return self._native.link_busy_s / self.steps

    def link_busy(self) -> list[tuple[float, float]]:
        """Busy intervals (begin, end) of the link in the recorded steps."""
        return self._native.link_busy

    def ranks(self) -> list[tuple[float, int]]:
        """Slowness of each device, and the number of ranks that it represents."""
        return [(device.slowness, device.ranks) for device in self._native.devices]

    def step_starts_s(self, device: int = 0) -> list[float]:
        """Start of each step; the last entry is the end of the last step."""
        return self._native.devices[device].step_starts_s

    def ops(self, device: int = 0) -> list[list[OpTimes]]:
        """Times of ops, by recorded step and op."""
        names = self._workload.native.op_names
        rows = _rows(self._native.devices[device].ops, len(names))
        return [
            [OpTimes(name, *times) for name, times in zip(names, row, strict=True)] for row in rows
        ]

    def updates(self, device: int = 0) -> list[SimulatedUpdate]:
        """Updates in the recorded steps, in order of their ends."""
        return [SimulatedUpdate(*times) for times in self._native.devices[device].updates]

    def slices(self) -> list[list[SliceTimes]]:
        """Times of slices, by recorded step and slice; the last step's slices end after it."""
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
