"""Which gradients of a recorded step would travel in 8 bits, and what that takes of the link.

The choice is that of ``Compression.auto`` in a job, from the times of the graph. A profile knows
neither shapes nor types, so every gradient counts as float32 that may travel in codes. In a job
gradients with one dimension do not: they are few bytes.
"""

from __future__ import annotations

from dataclasses import replace

from hvd_order.base.link.code_choice import TimedGradient, choose_to_spare
from hvd_order.base.link.link_model import LinkModel
from hvd_order.base.link.slice_settings import best_settings, reservation_lead_s
from hvd_order.planning.graph.graph import Graph
from hvd_order.planning.predict.network import Network
from hvd_order.planning.predict.scenario import AllReduceScenario, TransferSchedule
from hvd_order.planning.steps.program import gradient_transfers, unhindered

__all__ = ["WORTH", "coded_bytes", "coded_transfers", "in_order"]

WORTH = 1.02
"""Gain from which on a choice counts: trials on real steps keep codes only if these are clearly
faster."""

_BITS = 8.125 / 32  # a code and its part of a block's scale, of a float32


def coded_bytes(graph: Graph, link: LinkModel) -> dict[str, int]:
    """The gradients whose codes shorten the step, and their bytes as codes, by name."""
    step_s = max((end_s for _, end_s in unhindered(graph)), default=0.0)
    transfers = gradient_transfers(graph)
    timed = []
    for each in transfers:
        wire_s = each.size_bytes * link.seconds_per_byte
        work_s = each.release_s - (each.due_s - step_s)
        timed.append(TimedGradient(work_s, wire_s, _BITS * wire_s))
    chosen = (transfers[place] for place in choose_to_spare(step_s, timed))
    return {each.name: int(_BITS * each.size_bytes) for each in chosen}


def in_order(network: Network, size_bytes: int) -> TransferSchedule:
    """The schedule with which a run without a plan begins."""
    best = best_settings(network.link, size_bytes)
    return TransferSchedule(
        best.slice_bytes,
        best.credit_bytes,
        control_latency_s=network.message_latency_s,
        reservation_lead_s=reservation_lead_s(network.link, best),
    )


def coded_transfers(
    network: Network, schedule: TransferSchedule, clipped: bool
) -> tuple[AllReduceScenario, TransferSchedule]:
    """Network and schedule of sums of which some are encoded: all travel in halves.

    The simulator has halves for steps that are clipped. In others no half waits for a norm, so
    there a sum counts as one transfer that has the cost of two.
    """
    link = network.all_reduce()
    if not clipped:
        link = replace(link, slice_cost_s=2 * link.slice_cost_s)
    return link, replace(schedule, split=clipped, reservation_lead_s=0.0)
