"""The metrics by name: meaning, unit, and where their values come from. Needs no other package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from hvd_order.base.account.step_stats import StepStats

__all__ = ["METRICS", "Metric"]

Samples = Mapping[
    str, float
]  # by the value of the label; by "" where the metric has none of its own


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: without the prefix; ends with the base unit.
        help: one line.
        samples: values for one rank.
        kind: "counter" only grows within a job.
        label: besides those of the rank; empty: none.
        of_rank_0: whether rank 0 alone has it, since it is the same on all.
    """

    name: str
    help: str
    samples: Callable[[StepStats], Samples]
    kind: Literal["gauge", "counter"] = "gauge"
    label: str = ""
    of_rank_0: bool = False

    @property
    def full_name(self) -> str:
        """The name as Prometheus has it."""
        return f"hvd_order_{self.name}"


def _exposed(stats: StepStats) -> Samples:
    return {"late": stats.late_s, "queue": stats.queue_s, "transfer": stats.transfer_s}


METRICS = (
    Metric(
        "step_seconds",
        "Time from the first gradient of a step to that of the next; median of the last steps.",
        lambda stats: {"": stats.step_s},
    ),
    Metric(
        "compute_seconds",
        "Forward and backward pass of a step, without waits and updates.",
        lambda stats: {"": stats.compute_s},
    ),
    Metric(
        "exposed_seconds",
        "Communication that a step waited for. late: a rank had not computed the gradient; queue: "
        "other slices travelled first; transfer: the slice travelled.",
        _exposed,
        label="cause",
    ),
    Metric(
        "inversion_seconds",
        "Of the exposed time of cause queue, the part in which less urgent slices were sent.",
        lambda stats: {"": stats.inversion_s},
    ),
    Metric("update_seconds", "The user's optimizer.", lambda stats: {"": stats.update_s}),
    Metric(
        "host_seconds",
        "Outside the passes: the loader, and what follows the backward pass.",
        lambda stats: {"": stats.host_s},
    ),
    Metric(
        "loader_seconds",
        "Of the time outside the passes, the part before the first read of a parameter.",
        lambda stats: {"": stats.loader_s},
    ),
    Metric(
        "overlap_ratio",
        "The part of communication during which the rank computed or updated; 0 to 1.",
        lambda stats: {"": stats.overlap},
    ),
    Metric(
        "wire_bytes",
        "Bytes of all gradients of one step, as the rank hands them over.",
        lambda stats: {"": stats.wire_bytes},
    ),
    Metric("slice_bytes", "Size of a slice in use.", lambda stats: {"": stats.slice_bytes}),
    Metric(
        "credit_bytes",
        "How much may be in flight at once, as in use.",
        lambda stats: {"": stats.credit_bytes},
    ),
    Metric(
        "steps_total",
        "Steps of the optimizer since the job began.",
        lambda stats: {"": stats.steps},
        kind="counter",
    ),
    Metric(
        "slow_rank",
        "The rank that holds up the others, by what makes it slow; -1 with cause none: no rank.",
        lambda stats: {stats.slow_cause or "none": stats.slow_rank},
        label="cause",
        of_rank_0=True,
    ),
    Metric(
        "slow_seconds",
        "What the slow rank costs each step.",
        lambda stats: {"": stats.slow_s},
        of_rank_0=True,
    ),
    Metric(
        "clock_error_seconds",
        "Largest error of the comparison of clocks, on any rank.",
        lambda stats: {"": stats.clock_error_s},
        of_rank_0=True,
    ),
)
