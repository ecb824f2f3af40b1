"""The updates that ``step()`` has deferred until a reader needs a parameter or a gradient."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from hvd_order._native import _torch as native
from hvd_order.engine import timeline
from hvd_order.torch.gradients.gradient_transfer import GradientTransfer
from hvd_order.torch.gradients.step_recorder import StepRecorder
from hvd_order.torch.parameters.entry import ParameterEntry
from hvd_order.torch.parameters.entry_table import EntryTable
from hvd_order.torch.parameters.in_flight import CompletingGuard
from hvd_order.torch.parameters.kept_state import KeptState, as_at_step
from hvd_order.torch.parameters.kept_tensors import KeptTensors
from hvd_order.torch.parameters.read_guard import (
    GUARD,
    Guard,
    PendingTensor,
    arm_parameter,
    arm_tensor,
    disarm_parameter,
    set_guard,
)
from hvd_order.torch.updates import known_optimizers, optimizer_class, overlap, partial_step
from hvd_order.torch.updates.update_budget import UpdateBudget

__all__: list[str] = []

_MOST_NAMED = 5
# Past the members of a pending parameter's class.
_ATTRIBUTE: Any = torch.Tensor.grad
_grad, _set_grad = _ATTRIBUTE.__get__, _ATTRIBUTE.__set__
_REACHED = {
    native.Reach.SHARED: overlap.ALIASED,
    native.Reach.HELD: overlap.HELD,
    native.Reach.FOREIGN: overlap.FOREIGN,
}


class _AfterUpdate(CompletingGuard):
    """The guard of parameters whose update a device has yet to run.

    It holds nothing of the exchange, so that a dropped optimizer is freed.
    """

    def __init__(self, lock: threading.RLock, point: native.StreamPoint) -> None:
        self._lock = lock
        self._point = point

    def before_parameter_read(self, parameters: list[torch.Tensor]) -> None:
        """Makes the reader's streams wait for the update; disarms once it has run."""
        with self._lock:
            if self._point.passed():
                for parameter in parameters:
                    if getattr(parameter, GUARD, None) is self:  # else armed again meanwhile
                        disarm_parameter(parameter)

    def before_grad_attribute(self, parameter: torch.Tensor) -> None:
        """The update is launched: nothing is pending."""

    def before_gradient_read(self, gradients: list[torch.Tensor]) -> None:
        """Not the guard of any gradient."""


class DeferredUpdates:
    """The deferred updates of one step, applied by the user's optimizer with that step's settings.

    On a device an updated parameter stays armed until the update has run, so that readers on
    streams other than the first reader's wait for it as well.

    The exchange's lock is held in all methods.
    """

    def __init__(
        self,
        lock: threading.RLock,
        step: partial_step.InnerStep,
        transfer: GradientTransfer,
        table: EntryTable,
        recorder: StepRecorder,
    ) -> None:
        """Starts without deferred updates.

        Args:
            lock: the exchange's.
            step: the ``step`` of the user's optimizer.
            recorder: notes how long updates take.
        """
        self._recorder = recorder
        self._lock = lock
        self._inner_step = step
        self._transfer = transfer
        self._table = table
        self._pending: list[ParameterEntry] = []  # in consumption order
        self._for_reader = False
        self._budget = UpdateBudget()
        self._kept = KeptTensors()
        # Holds the optimizer while updates are deferred: dropping it must not lose them.
        self._recorded: partial_step.RecordedStep | None = None

    def defer(self, optimizer: Optimizer, guard: Guard) -> Mapping[ParameterEntry, str]:
        """Defers the updates of all parameters that only their known readers can see.

        Args:
            guard: called before the first read of each parameter.

        Returns:
            The parameters that were updated at once, with the reason.
        """
        entries = self._table.entries
        self._recorded = partial_step.RecordedStep(optimizer, self._inner_step)
        self._pending = sorted(entries, key=lambda entry: entry.tensor)
        native.advance(entries, native.GradientEvent.DEFER)
        at_once = self._reasons(optimizer)
        for entry in entries:
            if not arm_parameter(entry.parameter, guard):
                at_once.setdefault(entry, overlap.OWN_CLASS)
            elif entry not in at_once:
                state = () if entry.kept_state is None else entry.kept_state.tensors
                entry.lock_parameter(entry.parameter, state)
                for tensor in (*entry.kept, *state):
                    arm_tensor(tensor, entry.parameter)
        if entries:
            optimizer_class.guard(optimizer)
        if at_once:
            self.apply(at_once)
        return at_once

    @property
    def waiting(self) -> bool:
        """Whether there are deferred updates."""
        return bool(self._pending)

    def flush(self) -> Sequence[ParameterEntry]:
        """Applies all deferred updates, and returns their entries."""
        outstanding = self._pending
        if outstanding:
            self.apply(outstanding)
        return outstanding

    def apply(self, entries: Iterable[ParameterEntry]) -> None:
        """Waits for the gradients of ``entries`` and updates their parameters."""
        recorded = self._recorded
        entries = list(entries)
        # Readers on other threads find the parameters pending, and wait for the exchange's lock
        # until all is done; this thread bypasses the pending class.
        with (
            self._transfer.in_profile(entries),
            native.CleanRoom(),
            torch._C.DisableTorchFunctionSubclass(),
            native.OnHomeStreams(self._transfer.streams) as home,
        ):
            self._transfer.finish(entries)
            native.advance(entries, native.GradientEvent.UPDATE)
            due = set(entries)
            self._pending = [entry for entry in self._pending if entry not in due]
            after: _AfterUpdate | None = None
            try:
                self._update(entries)
                point = home.point()
                after = None if point is None else _AfterUpdate(self._lock, point)
            finally:
                for entry in entries:
                    entry.updated = after
                    if after is None:
                        disarm_parameter(entry.parameter)
                    else:
                        set_guard(entry.parameter, after)
                    self._end_guarding(entry)
                    entry.begin_step(self._table.passes)
                # Also if the user's optimizer raised: nothing is pending that the guard could end.
                if not self._pending and recorded is not None:
                    optimizer_class.unguard(recorded.optimizer)
                    self._recorded = None

    def _update(self, entries: Sequence[ParameterEntry]) -> None:
        due: list[ParameterEntry] = []
        gradients_before: list[torch.Tensor | None] = []
        for entry in entries:
            entry.unlock_parameter()
            if entry.used:
                due.append(entry)
                gradients_before.append(_grad(entry.parameter))
                if not entry.sparse:
                    shown = entry.gradient if entry.own is None else entry.own
                    _set_grad(entry.parameter, shown)
        try:
            if due:
                recorded = self._recorded
                assert recorded is not None
                with (
                    timeline.span(
                        "update",
                        "update",
                        lambda: self._transfer.places_of(due),
                        tensors=len(due),
                        reader=self._for_reader,
                    ),
                    self._budget.timed(due),
                    self._recorder.updating(),
                    as_at_step(entry.kept_state for entry in due),
                ):
                    recorded.run(entry.parameter for entry in due)
        except Exception as error:
            _explain(error, due)
            raise
        finally:
            for entry, before in zip(due, gradients_before, strict=True):
                # A gradient that only other ranks had stays until it is cleared, as every gradient
                # does.
                if not (entry.absent and not entry.cleared):
                    _set_grad(entry.parameter, before)

    @staticmethod
    def _end_guarding(entry: ParameterEntry) -> None:
        """Lets go of the program's tensors, which on a device stay armed as the parameter does."""
        state = () if entry.kept_state is None else entry.kept_state.tensors
        if entry.updated is None:
            for tensor in (*entry.kept, *state):
                disarm_parameter(tensor)
        entry.kept, entry.kept_state = (), None

    def bring_up_to_date(self, wanted: Sequence[ParameterEntry]) -> Sequence[ParameterEntry]:
        """Applies the updates of ``wanted`` as soon as possible, and others while it waits.

        Returns:
            The other entries that were updated.
        """
        self._transfer.note_moment("read", wanted)
        before = self._pending
        self._for_reader = True
        try:
            self._bring_up_to_date(wanted)
        finally:
            self._for_reader = False
        return [entry for entry in before if not entry.update_pending and entry not in wanted]

    def _bring_up_to_date(self, wanted: Sequence[ParameterEntry]) -> None:
        arrived = self._transfer.arrived()
        while not all(map(self._transfer.can_be_taken(), wanted)):
            portion = self._budget.of(filter(arrived, self._pending))
            if not portion:
                break
            self.apply(portion)
            arrived = self._transfer.arrived()
        self._transfer.finish(wanted)
        # Also applies some updates whose parameters are read next.
        self.apply(dict.fromkeys(
            [entry for entry in wanted if entry.update_pending]
            + self._budget.of(filter(arrived, self._pending))
        ))  # fmt: skip

    def clear(self, entry: ParameterEntry, set_to_none: bool) -> bool:
        """Clears ``.grad`` of a parameter whose update is deferred.

        Returns:
            Whether ``.grad`` is cleared; if not, the ordinary way works now.
        """
        parameter = entry.parameter
        if entry.absent:
            # Whether there is a gradient to zero depends on the other ranks; setting it to None
            # does not.
            if not set_to_none:
                self.apply([entry])
                return False
            entry.cleared = True
            return True
        # No mode of the caller's concerns the zeros: inference mode would make them unusable. And
        # whether there is a gradient is known here.
        with native.CleanRoom(), torch._C.DisableTorchFunctionSubclass():
            if parameter.grad is None:
                return True
            is_ours = parameter.grad is entry.gradient
            if not is_ours and not set_to_none:
                return False
            parameter.grad = None
            if set_to_none:
                return True
            if not entry.gradient_is_held:
                parameter.grad = torch.zeros_like(entry.gradient)
                return True
            parameter.grad = entry.gradient  # whoever keeps it expects zeros in it
        self.apply([entry])
        return False

    def _reasons(self, optimizer: Optimizer) -> dict[ParameterEntry, str]:
        """The parameters whose update must not wait, since other code could notice, and why.

        Other owners of a parameter's memory, or of the state that the optimizer keeps about it, may
        access it at any time without a guard. Plain tensors can be guarded: they become ``kept``
        and ``kept_state`` of the entry. An owner that appears later meets the read guard first.
        """
        entries = self._table.entries
        parameters = [entry.parameter for entry in entries]
        reasons: dict[ParameterEntry, str] = {}
        self._kept.release()
        reached = native.reached(parameters)
        states = native.held_states(optimizer, parameters, PendingTensor)
        base = getattr(optimizer, "_hvd_base", type(optimizer))
        may_guard = bool(states) and known_optimizers.changes_state_in_place(optimizer, base)
        for place, entry in enumerate(entries):
            if entry.sparse:
                # Its gradient has no place of its own in which it could outlive zero_grad().
                reasons[entry] = overlap.SPARSE
            elif entry.own is not None:
                reasons[entry] = overlap.GRADIENT_KEPT
            elif not entry.deferrable:
                reasons[entry] = overlap.UNSEEN
            elif place in reached and reached[place] != native.Reach.SHARED:
                reasons[entry] = _REACHED[reached[place]]
            elif place in states:
                state = states[place]
                if state is not None and may_guard:
                    entry.kept_state = KeptState(state)
                else:
                    reasons[entry] = overlap.STATE_HELD
        shared = [entries[place] for place in reached if entries[place] not in reasons]
        for entry in self._kept.guard(shared):
            reasons[entry] = _REACHED[native.Reach.SHARED]
        return reasons


def _explain(error: Exception, due: Sequence[ParameterEntry]) -> None:
    """Tells whose update raised: the reader, on top of the stack, has nothing to do with it."""
    if hasattr(error, "add_note"):  # Python 3.11
        names = ", ".join(f"'{entry.name}'" for entry in due[:_MOST_NAMED])
        more = f" and {len(due) - _MOST_NAMED} more" if len(due) > _MOST_NAMED else ""
        error.add_note(
            f"raised by the optimizer of the last step(), whose update of {names}{more} had waited "
            "for its first reader; it will not be tried again, as after an error in step()"
        )
