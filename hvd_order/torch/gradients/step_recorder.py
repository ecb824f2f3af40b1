"""Notes the times of one optimizer's steps on this rank, for their account."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from hvd_order._native import _torch as native
from hvd_order.base.account.step_parts import StepMarks
from hvd_order.engine.account.noted_step import NotedStep
from hvd_order.engine.account.step_account import StepAccount
from hvd_order.torch.sums.registered_model import RegisteredModel

__all__: list[str] = []

_AT_END_NS = 1_000_000  # after step(): the program clears gradients there, not before a pass


class StepRecorder:
    """The present step. The exchange's lock is held in all methods."""

    def __init__(self, account: StepAccount, model: RegisteredModel) -> None:
        """Notes nothing before the first gradient."""
        self._account = account
        self._model = model
        self._times = StepMarks(0)
        self._has_ended = False
        self._cleared_ns = 0
        self._layout: native.SliceLayout | None = None
        self._slices = 0
        model.waits.spans = self._times.waits

    def begin_step(self) -> None:
        """Notes the first gradient of a step; the step before has ended on this rank."""
        if self._times.begin_ns and not self._has_ended:
            return  # it was given up: its time belongs to the step that follows
        now = time.monotonic_ns()
        if self._has_ended and self._account.wants:
            slices = self._slices_of(self._model.layout)
            self._times.end_ns = now
            self._times.read_ns = self._times.read_ns or self._cleared_ns
            self._account.record(
                NotedStep(
                    self._times,
                    self._model.layout,
                    self._model.slice_times().ljust(24 * slices, b"\0"),  # some never came
                    slices,
                    self._model.wire_bytes,
                )
            )
        self._times = StepMarks(now)
        self._model.waits.spans = self._times.waits
        self._has_ended = False
        self._cleared_ns = 0

    def _slices_of(self, layout: native.SliceLayout) -> int:
        """Counts the slices; makes their list once for each layout."""
        if layout is not self._layout:
            self._layout, self._slices = layout, len(layout.slices)
        return self._slices

    def end_backward(self) -> None:
        """Notes the end of a backward pass."""
        self._times.backward_ns = time.monotonic_ns()

    def call_step(self) -> None:
        """Notes the begin of ``step()``."""
        self._times.called_ns = time.monotonic_ns()

    def end_step(self) -> None:
        """Notes the end of ``step()``, and exchanges what was noted when it is time."""
        self._times.returned_ns = time.monotonic_ns()
        self._has_ended = True
        self._account.step_taken(_queued_ns)

    def was_cleared(self) -> None:
        """Notes a call of ``zero_grad()``: where no read of a parameter is seen, a forward pass
        begins there, unless it is called at the end of a step.
        """
        if self._has_ended:
            now = time.monotonic_ns()
            if now - self._times.returned_ns >= _AT_END_NS:
                self._cleared_ns = now

    def was_read(self) -> None:
        """Notes a read of a parameter."""
        if self._has_ended and not self._times.read_ns:
            self._times.read_ns = time.monotonic_ns()

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Notes the update that runs in this context."""
        first, begin = len(self._times.waits), time.monotonic_ns()
        try:
            yield
        finally:
            for wait_begin, wait_end, _ in self._times.waits[first:]:
                self._times.updates.append((begin, wait_begin))
                begin = wait_end
            self._times.updates.append((begin, time.monotonic_ns()))


def _queued_ns() -> int | None:
    """How long the calling thread has waited for a core; None: the kernel does not tell."""
    try:
        with open("/proc/thread-self/schedstat", encoding="ascii") as file:
            return int(file.read().split()[1])
    except (OSError, ValueError, IndexError):
        return None
