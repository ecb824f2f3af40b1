"""What parameter servers cost, in words; what could not be told is said."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hvd_order.base.link.busy_union import LinkUse
from hvd_order.planning.predict.units import byte_rate_text, rate_text, time_text
from hvd_order.planning.report.page import counted
from hvd_order.servers.costs import Cost, ServerCosts

if TYPE_CHECKING:
    from hvd_order.planning.predict.workers.calibration import Calibration

__all__ = ["NOT_APART", "calibration_text", "cost_text", "job_text", "lines_of", "link_text"]

NOT_APART = "slices had about one size, so time by slice and time by byte cannot be told apart"


def job_text(costs: ServerCosts) -> str:
    """The measured job: ``1 server, 2 workers, sync``."""
    return f"{counted(costs.servers, 'server')}, {counted(costs.workers, 'worker')}, {costs.mode}"


def lines_of(costs: ServerCosts) -> Iterator[str]:
    """One line for each thing that was measured."""
    traced = costs.strategy is not None  # TensorFlow's traces tell of neither pushes nor ends
    if not traced:
        yield f"link, {_use_text(costs.push, 'pushes')}"
    yield f"link, {_use_text(costs.answer, 'answers')}"
    what = "update" if costs.updates == "server" else "sum, as the servers did not update"
    yield f"server, {what}: {cost_text(costs.update)}"
    if not traced:
        yield f"server, its end of a push: {cost_text(costs.server_end)}"
        yield f"worker, its end of an answer: {cost_text(costs.worker_end)}"
    if costs.step_s:
        yield f"worker, a step: {time_text(statistics.fmean(costs.step_s))}"
    if not all(cost.apart for cost in (costs.update, costs.server_end, costs.worker_end)):
        yield NOT_APART


def link_text(bytes_per_s: float, at_least: bool) -> str:
    """``at least 10 Gbit/s``."""
    return f"{'at least ' * at_least}{rate_text(bytes_per_s)}"


def cost_text(cost: Cost) -> str:
    """``2.1 GB/s and 30 us a slice``."""
    parts = []
    if cost.seconds_per_byte > 0:
        parts.append(byte_rate_text(1 / cost.seconds_per_byte))
    if cost.seconds > 0 or not parts:
        parts.append(f"{time_text(cost.seconds)} a slice")
    return " and ".join(parts)


def calibration_text(found: Calibration) -> str:
    """What the profiled job took more than simulated, and where that is counted."""
    took, simulated = time_text(found.measured_s), time_text(found.simulated_s)
    if not found.exchange_s:
        return f"A step of the profiled job took {took}, not more than simulated ({simulated})."
    return (
        f"A step of the profiled job took {took}, simulated {simulated}: the worker gets "
        f"{time_text(found.exchange_s)} more for each parameter."
    )


def _use_text(use: LinkUse, what: str) -> str:
    count = f"{use.transfers} of {use.size_bytes / max(use.transfers, 1) / 1e3:.3g} kB"
    if use.bytes_per_s is None:
        return f"{what}: cannot be told ({count} are too small to time)"
    text = f"{what}: {link_text(use.bytes_per_s, use.at_least)} ({count}"
    if use.at_least:
        text += "; the receiver may have been slower than the link"
    return f"{text})"
