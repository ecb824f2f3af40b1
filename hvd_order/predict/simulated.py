"""What a simulation tells: steps, ops, updates, slices and links, in seconds since its start."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TypeVar

from hvd_order import _core
from hvd_order.predict.scenario import Workload

__all__ = ["OpTimes", "Simulated", "SliceTimes", "UpdateTimes"]

T = TypeVar("T")


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
