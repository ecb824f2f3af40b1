"""What a frontend notes about a step, for its account."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_order._native import _torch as native
from hvd_order.base.account.step_parts import StepMarks

__all__: list[str] = []


@dataclass(frozen=True)
class NotedStep:
    """One step on this rank that has ended.

    Attributes:
        layout: of the slices.
        slices: (ready, issued, done) of each slice, ns, as `native.Engine.slice_times` has them;
            empty: the slices were cut anew.
        wire_bytes: of the gradients.
    """

    times: StepMarks
    layout: native.SliceLayout
    slices: bytes
    slices_count: int
    wire_bytes: int
