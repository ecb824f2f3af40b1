"""First part: what the agreement adds to a step in virtual time, and its messages."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.runner.workloads.profiles import PROFILES
from hvd_order.base.link.link_model import LinkModel
from hvd_order.base.link.slice_settings import best_settings, reservation_lead_s
from hvd_order.planning.predict.simulate import (
    AllReduceScenario,
    Simulated,
    StepWorkload,
    TransferSchedule,
    simulate,
)

MODELS = ("resnet50", "gpt2_small")
RATES_GBIT = (10, 100)
FAN_OUT = 4  # csrc/scheduler/tree.h
FRAME_BYTES = 512  # csrc/torch/c10d/frames.cc; it holds 125 slices, more than a message here
STEPS = 40


@dataclass(frozen=True)
class Cell:
    """One model on one network.

    Attributes:
        rate_gbit: of every rank's link, each way.
        latency_s: of a message on the wire, the agreement's and the all-reduce's.
        send_s: time of the sender's processor for a message of the agreement.
    """

    model: str
    all_reduce: str
    rate_gbit: int
    ranks: int
    latency_s: float
    send_s: float


def measure_steps(
    sizes: list[int], networks: list[str], latency_s: float, send_s: float
) -> list[dict[str, Any]]:
    """Steps of all models, networks, numbers of ranks and agreements."""
    rows = []
    for model in MODELS:
        for all_reduce in networks:
            for rate in RATES_GBIT:
                for ranks in sizes:
                    cell = Cell(model, all_reduce, rate, ranks, latency_s, send_s)
                    rows += list(_measure(cell))
    return rows


def depth_of_tree(ranks: int, fan_out: int) -> int:
    """Levels below rank 0; the last rank is on the deepest."""
    depth, rank = 0, ranks - 1
    while rank > 0:
        rank = (rank - 1) // fan_out
        depth += 1
    return depth


def _measure(cell: Cell) -> Iterator[dict[str, Any]]:
    profile = PROFILES[cell.model]()
    work = profile.workload()
    make = AllReduceScenario.ring if cell.all_reduce == "ring" else AllReduceScenario.tree
    network = make(cell.ranks, cell.latency_s, 1e9 / 8 * cell.rate_gbit)
    # What hvd_order would measure of such a transport.
    link = LinkModel(network.latency_s, network.slice_cost_s, network.seconds_per_byte)
    settings = best_settings(link, profile.size_bytes)
    free = TransferSchedule(
        settings.slice_bytes,
        settings.credit_bytes,
        settings.policy,
        reservation_lead_s=reservation_lead_s(link, settings),
    )
    instantaneous = simulate(work, network, free, ranks=cell.ranks, steps=STEPS, recorded=1)
    last = instantaneous.slices()[-1]
    plan = sorted(range(len(last)), key=lambda number: last[number].issued_s)
    costs = {"control_latency_s": cell.latency_s, "control_send_s": cell.send_s}
    star = max(1, cell.ranks - 1)
    agreements = {
        "leader": replace(free, fan_out=FAN_OUT, **costs),
        "negotiated": replace(free, agreement="negotiated", fan_out=FAN_OUT, **costs),
        "planned": replace(free, policy="planned", agreement="planned", plan=plan),
        "leader, star": replace(free, fan_out=star, **costs),
    }
    for name, schedule in agreements.items():
        every = schedule.agreement != "planned"  # else all ranks do the same
        begin = time.perf_counter()
        run = simulate(
            work, network, schedule, ranks=cell.ranks, steps=STEPS, every_agreement=every
        )
        took_s = time.perf_counter() - begin
        yield {
            "model": cell.model,
            "all_reduce": cell.all_reduce,
            "rate_gbit": cell.rate_gbit,
            "ranks": cell.ranks,
            "agreement": name,
            "slice_bytes": schedule.slice_bytes,
            "credit_bytes": schedule.credit_bytes,
            "slices": len(last),
            "free_step_s": instantaneous.steady_s,
            "step_s": run.steady_s,
            "added_s": run.steady_s - instantaneous.steady_s,
            "decision_s": _decision_s(cell.ranks, schedule, every),
            "fan_out": min(schedule.fan_out, cell.ranks - 1) if every else 0,
            "depth": depth_of_tree(cell.ranks, schedule.fan_out) if every else 0,
            "simulated_in_s": took_s,
            **_traffic(run),
        }


def _decision_s(ranks: int, schedule: TransferSchedule, every: bool) -> float:
    """From a gradient that is ready on all ranks until the last rank has issued it.

    It is what the agreement adds to a step of one gradient, where nothing hides a message.
    """
    work = StepWorkload.chain(["layer"], [1.0], [1.0], [[64]])
    alone = replace(schedule, plan=range(len(schedule.plan) and 1), reservation_lead_s=0.0)
    link = AllReduceScenario(latency_s=0.0, seconds_per_byte=1e-3)
    free = simulate(work, link, replace(alone, control_latency_s=0.0, control_send_s=0.0),
                    ranks=ranks, steps=4)  # fmt: skip
    run = simulate(work, link, alone, ranks=ranks, steps=4, every_agreement=every)
    return run.steady_s - free.steady_s


def _traffic(run: Simulated) -> dict[str, float]:
    """Messages in a step, sent and received, of the rank with most of them and of rank 0."""
    ranks = run.agreement()
    messages = [rank.sent_messages + rank.received_messages for rank in ranks]
    busiest = max(range(len(ranks)), key=lambda rank: messages[rank])
    found: dict[str, float] = {"busiest_rank": busiest}
    for name, number in (("busiest", busiest), ("rank_0", 0)):
        found[f"{name}_messages"] = messages[number]
        found[f"{name}_sent_messages"] = ranks[number].sent_messages
        found[f"{name}_bytes"] = FRAME_BYTES * messages[number]
    return found
