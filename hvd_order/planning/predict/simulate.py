"""Simulates training steps with the scheduler and agreements that real runs use.

A ``StepWorkload`` is the computation of one rank, an ``AllReduceScenario`` the cost of transfers,
and a ``TransferSchedule`` their order and slices (scenario.py). ``simulate`` combines them into a
``Simulated`` (simulated.py). docs/simulator.md describes the model and its limits. Parameter
servers have a simulator of their own (workers/).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from hvd_order._native import _core
from hvd_order.planning.predict.scenario import (
    AllReduceScenario,
    ScenarioOp,
    ScenarioParameter,
    StepWorkload,
    TransferSchedule,
    ddp,
    named,
)
from hvd_order.planning.predict.simulated import (
    OpTimes,
    Simulated,
    SimulatedAgreement,
    SimulatedUpdate,
    SliceTimes,
)

__all__ = [
    "AllReduceScenario",
    "OpTimes",
    "ScenarioOp",
    "ScenarioParameter",
    "Simulated",
    "SimulatedAgreement",
    "SimulatedUpdate",
    "SliceTimes",
    "StepWorkload",
    "TransferSchedule",
    "ddp",
    "simulate",
]

_ORDERS = {"program": True, "ready": False}


def simulate(
    workload: StepWorkload,
    network: AllReduceScenario,
    schedule: TransferSchedule | None = None,
    *,
    ranks: int | Sequence[float] = 2,
    steps: int = 10,
    recorded: int = 0,
    order: Literal["program", "ready"] = "program",
    clipped: bool = False,
    every_rank: bool = False,
    every_agreement: bool = False,
) -> Simulated:
    """Trains for some steps in virtual time. Equal input gives bitwise equal results.

    Args:
        schedule: None for the defaults of ``TransferSchedule``.
        ranks: number of ranks of equal speed, or a time factor for each rank.
        recorded: number of last steps whose times of ops and slices are kept.
        order: "program": a stream runs its ops as listed and waits for each (eager frameworks);
            "ready": it runs the first listed op that can run (dataflow executors).
        clipped: whether the program clips gradients by the norm of all of them, which every update
            then waits for. With whole all-reduces all gradients are awaited, whatever
            ``cross_iteration`` is; with split ones each parameter waits for the squares and for
            its own all-gathers.
        every_rank: also simulate ranks that compute exactly as another rank.
        every_agreement: simulate the agreement of all ranks, each at its place in the tree of
            ranks. Else all are children of rank 0, and ranks of one speed are one. That is an
            approximation for more ranks than rank 0 and ``fan_out`` children, and if a message has
            a ``control_send_s``.

    Raises:
        InvalidUsage: the scenario is impossible or deadlocks; the message names the op and the
            slice that wait.
    """
    schedule = schedule or TransferSchedule()
    native = _core.simulate(
        workload.native,
        network.native(),
        slowness=[1.0] * ranks if isinstance(ranks, int) else list(ranks),
        slice_bytes=schedule.slice_bytes,
        credit_bytes=schedule.credit_bytes,
        split=schedule.split,
        policy=schedule.native_policy(),
        agreement=schedule.native_agreement(),
        plan=list(schedule.plan),
        control_latency_s=schedule.control_latency_s,
        control_send_s=schedule.control_send_s,
        fan_out=schedule.fan_out,
        reservation_lead_s=schedule.reservation_lead_s,
        program_order=named("order", order, _ORDERS),
        cross_iteration=schedule.cross_iteration,
        clipped=clipped,
        every_rank=every_rank,
        every_agreement=every_agreement,
        steps=steps,
        recorded=recorded,
    )
    layout = workload.layout(schedule.slice_bytes, schedule.split)
    return Simulated(native.step_s, native.end_s, steps, recorded, workload, layout, native)
