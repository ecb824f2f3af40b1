"""Simulates training steps with the scheduler and agreements that real runs use.

A ``Workload`` is what one rank computes, a network (``AllReduce`` or ``ParameterServers``) what
transfers cost, a ``Schedule`` in which order and in what pieces they go (scenario.py); ``simulate``
puts them together and gives a ``Simulated`` (simulated.py). The model and what it leaves out:
docs/simulator.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from hvd_order import _core
from hvd_order.predict.scenario import (
    AllReduce,
    Op,
    Parameter,
    ParameterServers,
    Schedule,
    Workload,
    ddp,
    named,
)
from hvd_order.predict.simulated import OpTimes, Simulated, SliceTimes, UpdateTimes

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

_ORDERS = {"program": True, "ready": False}


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
        policy=schedule.native_policy(),
        agreement=schedule.native_agreement(),
        plan=list(schedule.plan),
        control_latency_s=schedule.control_latency_s,
        reservation_lead_s=schedule.reservation_lead_s,
        program_order=named("order", order, _ORDERS),
        cross_step=schedule.cross_step,
        every_rank=every_rank,
        steps=steps,
        recorded=recorded,
    )
    layout = workload.layout(schedule.slice_bytes)
    return Simulated(native.step_s, native.end_s, steps, recorded, workload, layout, native)
