"""Reports of steps as the account makes them, for tests of who shows them."""

from __future__ import annotations

from hvd_order.base.account.step_stats import StepStats
from hvd_order.engine.account.reports import StepReport

__all__ = ["report_of", "stats_of"]


def stats_of(rank: int, steps: int = 20) -> StepStats:
    """An account whose times tell the rank; rank 1 is slow."""
    return StepStats(
        steps=steps, step_s=0.5 + rank / 10, compute_s=0.25, late_s=0.125, queue_s=0.0625,
        transfer_s=0.03125, update_s=0.02, host_s=0.01, loader_s=0.005, overlap=0.75,
        inversion_s=0.015, wire_bytes=4096, slice_bytes=1024, credit_bytes=2048,
        way="leader order, whole all-reduces", slow_rank=1, slow_cause="loader",
        slow_detail="/data/secret.bin", slow_s=0.1, without_s=0.4, clock_error_s=0.001,
    )  # fmt: skip


def report_of(rank: int, size: int, steps: int = 20, key: str = "SGD 0") -> StepReport:
    """The report of one rank of a job of one host."""
    everyone = [stats_of(each, steps) for each in range(size)]
    return StepReport(key, everyone[rank], everyone, range(size), ["node1"] * size)
