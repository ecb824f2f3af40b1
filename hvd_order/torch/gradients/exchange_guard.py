"""Handles reads of one optimizer's parameters and gradients."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Sequence
from typing import Any

import torch

from hvd_order.base.errors import InvalidUsage
from hvd_order.torch.gradients.deferred_updates import DeferredUpdates
from hvd_order.torch.gradients.gradient_norms import GradientNorms
from hvd_order.torch.gradients.gradient_transfer import GradientTransfer
from hvd_order.torch.gradients.step_gradients import StepGradients
from hvd_order.torch.gradients.step_recorder import StepRecorder
from hvd_order.torch.gradients.warm_up import WarmUp
from hvd_order.torch.parameters.compiled_regions import CompiledRegions, Enter
from hvd_order.torch.parameters.entry import ParameterEntry
from hvd_order.torch.parameters.entry_table import EntryTable
from hvd_order.torch.parameters.in_flight import Change
from hvd_order.torch.parameters.read_guard import (
    disarm_gradient,
    disarm_parameter,
    is_armed,
    set_guard,
)
from hvd_order.torch.sums.registered_model import RegisteredModel

__all__: list[str] = []


class ExchangeGuard:
    """The `Guard` of the parameters and gradients of one optimizer.

    Readers may run on any thread; the guard takes the exchange's lock.
    """

    def __init__(
        self,
        lock: threading.RLock,
        table: EntryTable,
        model: RegisteredModel,
        transfer: GradientTransfer,
        warm_up: WarmUp,
        gradients: StepGradients,
        norms: GradientNorms,
        updates: DeferredUpdates,
        enter: Enter,
        recorder: StepRecorder,
    ) -> None:
        """Starts with nothing armed.

        Args:
            enter: calls `enter_region`; hooks on the user's modules hold it.
            recorder: notes the first read after a step.
        """
        self._recorder = recorder
        self._lock = lock
        self._table = table
        self._model = model
        self._transfer = transfer
        self._warm_up = warm_up
        self._gradients = gradients
        self._norms = norms
        self._updates = updates
        self._regions = CompiledRegions(enter)

    def before_parameter_read(self, parameters: list[torch.Tensor]) -> None:
        """Updates the parameters, and others whose gradients have arrived by then."""
        with self._lock:
            self._recorder.was_read()
            wanted = []
            for parameter in parameters:
                entry = self._table.of(parameter)
                assert entry is not None  # this guard armed it
                self._warm_up.was_read(entry)
                if entry.update_pending:
                    wanted.append(entry)
                elif entry.updated is None:
                    disarm_parameter(parameter)
                else:
                    set_guard(parameter, entry.updated)
                    entry.updated.before_parameter_read([parameter])
            if wanted:
                others = self._updates.bring_up_to_date(wanted)
                self._warm_up.watch_again(others, self)

    def in_profile(self, parameters: list[torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
        """See `Guard`."""
        with self._lock:
            entries = [self._table.of(parameter) for parameter in parameters]
            pending = [entry for entry in entries if entry is not None and entry.update_pending]
            return self._transfer.in_profile(pending)

    def before_grad_attribute(self, parameter: torch.Tensor) -> None:
        """Handles a read or write of ``.grad`` of a pending parameter."""
        with self._lock:
            entry = self._table.of(parameter)
            # Whether the gradient is None depends on the other ranks.
            if entry is not None and entry.update_pending and entry.absent and not entry.cleared:
                self._updates.apply([entry])
                self._warm_up.watch_again([entry], self)  # the parameter has not been read

    def norms(self, gradients: list[torch.Tensor], order: float) -> list[torch.Tensor] | None:
        """See `Guard`."""
        with self._lock:
            entries = self._on_their_way(gradients)
            if entries is None or not self._gradients.may_stay_in_flight:
                return None
            if order == math.inf and not self._norms.may_have_maxima():
                return None
            if not self._gradients.use_in_flight(self):
                return None
            return self._norms.of(entries, order, opens=not self._gradients.synchronized)

    def are_finite(self, gradients: list[torch.Tensor]) -> torch.Tensor | None:
        """See `Guard`."""
        with self._lock, torch.no_grad():
            entries = self._on_their_way(gradients)
            if entries is None or not self._gradients.use_in_flight(self):
                return None
            finite = self._norms.are_finite(entries)
            if finite is None and self._model.is_split:
                # What follows is noted here, as it is on ranks that have completed them before.
                self.before_gradient_read(gradients)
                finite = self._norms.are_finite(entries)
            return finite

    def change(self, gradients: list[torch.Tensor], change: Change) -> bool:
        """See `Guard`."""
        with self._lock:
            entries = self._on_their_way(gradients)
            return entries is not None and self._gradients.change(entries, change, self)

    def may_stay_in_flight(self, gradients: list[torch.Tensor]) -> bool:
        """See `Guard`."""
        with self._lock:
            entries = self._on_their_way(gradients)
            return entries is not None and self._gradients.may_stay_in_flight

    def _on_their_way(self, gradients: Sequence[torch.Tensor]) -> list[ParameterEntry] | None:
        """The entries of gradients whose updates are not deferred; None unless all are such."""
        entries = [self._table.of_gradient(gradient) for gradient in gradients]
        found = [entry for entry in entries if entry is not None and not entry.update_pending]
        return found if len(found) == len(entries) else None

    def before_gradient_read(self, gradients: list[torch.Tensor]) -> None:
        """Completes the exchange of the gradients."""
        with self._lock:
            self._model.use.check_may_read(self._gradients.fresh)
            wanted = {id(gradient) for gradient in gradients}
            entries = [entry for entry in self._table.entries if id(entry.gradient) in wanted]
            outstanding = [entry for entry in entries if entry.update_pending]
            if outstanding:
                self._updates.apply(outstanding)
                self._warm_up.watch_again(outstanding, self)
            if self._gradients.in_backward:
                self._check_all_sent(entries)
                self._gradients.release()
                self._transfer.finish(entries)
            elif not self._gradients.fresh and not self._gradients.synchronized:
                self._gradients.finish(self)
            if not self._gradients.stay_armed:
                for entry in entries:
                    disarm_gradient(entry.gradient)

    def _check_all_sent(self, read: Sequence[ParameterEntry]) -> None:
        """Raises instead of waiting for gradients that the waiting backward pass has yet to
        compute.
        """
        if read and not all(entry.sent for entry in self._table.entries):
            raise InvalidUsage(
                f"the gradient of '{read[0].name}' was read in the middle of the backward pass, "
                "where it is still being summed over the ranks; read it after backward(), or use "
                "Tensor.register_hook, which sees this rank's own gradient"
            )

    def find_compiled_regions(self) -> None:
        """Finds compiled modules, whose graphs must not receive an armed parameter."""
        self._regions.find(self._table.entries)

    def enter_region(self, parameters: list[torch.Tensor]) -> None:
        """Handles the start of code that reads ``parameters`` invisibly to Python."""
        armed = [p for p in parameters if is_armed(p) and self._table.of(p) is not None]
        if armed:
            self.before_parameter_read(armed)
            for parameter in armed:
                disarm_parameter(parameter)  # also if its update is yet to run on the device
