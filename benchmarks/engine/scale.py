"""What does the order agreement add to a step of many ranks, in virtual time? See README.md."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks.runner.question import Answer, ask, option
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


def measure(options: argparse.Namespace) -> Answer:
    """Steps of all models, links, numbers of ranks and agreements."""
    costs = {
        "control_latency_s": 1e-6 * options.latency_us, "control_send_s": 1e-6 * options.send_us
    }  # fmt: skip
    rows = [
        row
        for model in MODELS
        for rate_gbit in RATES_GBIT
        for ranks in options.ranks
        for row in _rows(model, rate_gbit, ranks, costs)
    ]
    added: dict[str, float] = {}  # the largest share of a step, of all models and links
    for row in rows:
        name = f"{row['agreement']}, {row['ranks']} ranks"
        added[name] = max(row["added_s"] / row["free_step_s"], added.get(name, 0.0))
    return Answer({"steps": rows}, {"added": added})


def _rows(
    model: str, rate_gbit: int, ranks: int, costs: dict[str, float]
) -> Iterator[dict[str, Any]]:
    """One model on one ring of ranks, under each agreement."""
    profile = PROFILES[model]()
    work = profile.workload()
    network = AllReduceScenario.ring(ranks, costs["control_latency_s"], 1e9 / 8 * rate_gbit)
    # What hvd_order would measure of such a transport.
    link = LinkModel(network.latency_s, network.slice_cost_s, network.seconds_per_byte)
    settings = best_settings(link, profile.size_bytes)
    free = TransferSchedule(
        settings.slice_bytes,
        settings.credit_bytes,
        settings.policy,
        reservation_lead_s=reservation_lead_s(link, settings),
    )
    instantaneous = simulate(work, network, free, ranks=ranks, steps=STEPS, recorded=1)
    last = instantaneous.slices()[-1]
    plan = sorted(range(len(last)), key=lambda number: last[number].issued_s)
    agreements = {
        "leader": replace(free, fan_out=FAN_OUT, **costs),
        "negotiated": replace(free, agreement="negotiated", fan_out=FAN_OUT, **costs),
        "planned": replace(free, policy="planned", agreement="planned", plan=plan),
        "leader, star": replace(free, fan_out=max(1, ranks - 1), **costs),
    }
    for name, schedule in agreements.items():
        every = schedule.agreement != "planned"  # else all ranks do the same
        begin = time.perf_counter()
        run = simulate(work, network, schedule, ranks=ranks, steps=STEPS, every_agreement=every)
        took_s = time.perf_counter() - begin
        yield {
            "model": model,
            "rate_gbit": rate_gbit,
            "ranks": ranks,
            "agreement": name,
            "slice_bytes": schedule.slice_bytes,
            "credit_bytes": schedule.credit_bytes,
            "slices": len(last),
            "free_step_s": instantaneous.steady_s,
            "step_s": run.steady_s,
            "added_s": run.steady_s - instantaneous.steady_s,
            "decision_s": _decision_s(ranks, schedule, every),
            "fan_out": min(schedule.fan_out, ranks - 1) if every else 0,
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
    """Messages in a step, sent and received, of the rank with most of them."""
    messages = [rank.sent_messages + rank.received_messages for rank in run.agreement()]
    busiest = max(range(len(messages)), key=lambda rank: messages[rank])
    return {
        "busiest_rank": busiest,
        "busiest_messages": messages[busiest],
        "busiest_bytes": FRAME_BYTES * messages[busiest],
    }


if __name__ == "__main__":
    sys.exit(ask(
        "scale", __doc__, measure,
        option("--ranks", [2, 8, 32, 128, 512, 1024, 4096]),
        option("--latency-us", 25.0, "of a message on the wire"),
        option("--send-us", 10.2, "of a message for its sender; the default was measured"),
        quick={"ranks": [2, 32]},
    ))  # fmt: skip
