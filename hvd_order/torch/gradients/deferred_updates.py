"""The updates that ``step()`` has put off, until somebody reads a parameter or a gradient."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.optim import Optimizer

from hvd_order import _torch as native
from hvd_order.c10d.engine import timeline
from hvd_order.torch.gradients.gradient_transfer import GradientTransfer
from hvd_order.torch.parameters.entry import Slot
from hvd_order.torch.parameters.entry_table import SlotTable
from hvd_order.torch.parameters.read_guard import Guard, arm_parameter, disarm_parameter
from hvd_order.torch.updates import optimizer_class, overlap, partial_step
from hvd_order.torch.updates.update_budget import Portion

__all__: list[str] = []

_REACHED = {
    native.Reach.SHARED: overlap.ALIASED,
    native.Reach.HELD: overlap.HELD,
    native.Reach.FOREIGN: overlap.FOREIGN,
}


class OutstandingUpdates:
    """Updates of one step, each applied by the user's own optimizer, as it was set at that step.

    The exchange's lock is held in all methods.
    """

    def __init__(
        self, step: partial_step.InnerStep, transfer: GradientTransfer, table: SlotTable
    ) -> None:
        """Nothing is outstanding.

        Args:
            step: of the user's optimizer.
        """
        self._inner_step = step
        self._transfer = transfer
        self._table = table
        self._pending: list[Slot] = []  # in consumption order
        self._portion = Portion()
        # Holds the optimizer while updates are outstanding: dropping it must not lose them.
        self._recorded: partial_step.RecordedStep | None = None

    def put_off(self, optimizer: Optimizer, guard: Guard) -> Mapping[Slot, str]:
        """Puts off the updates of all parameters that only their known readers can see.

        Args:
            guard: is told of the first reader of each.

        Returns:
            Those that were updated at once, with the reason.
        """
        slots = self._table.slots
        self._recorded = partial_step.RecordedStep(optimizer, self._inner_step)
        self._pending = sorted(slots, key=lambda slot: slot.tensor)
        for slot in slots:
            slot.update_pending = True
        at_once = _reasons(optimizer, slots)
        for slot in slots:
            if not arm_parameter(slot.parameter, guard):
                at_once.setdefault(slot, overlap.OWN_CLASS)
            elif slot not in at_once:
                slot.lock()
        if slots:
            optimizer_class.guard(optimizer)
        if at_once:
            self.apply(at_once)
        return at_once

    def flush(self) -> Sequence[Slot]:
        """Applies all that are outstanding, and returns which these were."""
        outstanding = self._pending
        if outstanding:
            self.apply(outstanding)
        return outstanding

    def apply(self, slots: Iterable[Slot]) -> None:
        """Waits for the gradients of ``slots`` and updates their parameters."""
        recorded = self._recorded
        slots = list(slots)
        # Readers on other threads find the parameters pending, and wait for the exchange's lock,
        # until all is done; this thread passes the class by.
        with native.CleanRoom(), torch._C.DisableTorchFunctionSubclass():
            self._transfer.finish(slots)
            for slot in slots:
                slot.update_pending = False
            self._pending = [slot for slot in self._pending if slot.update_pending]
            try:
                self._update(slots)
            finally:
                for slot in slots:
                    disarm_parameter(slot.parameter)
                    slot.begin_step(self._table.passes)
        if not self._pending and recorded is not None:
            optimizer_class.unguard(recorded.optimizer)
            self._recorded = None

    def _update(self, slots: Sequence[Slot]) -> None:
        due: list[Slot] = []
        gradients_before: list[torch.Tensor | None] = []
        for slot in slots:
            slot.unlock()
            if slot.used:
                due.append(slot)
                gradients_before.append(slot.parameter.grad)
                if not slot.sparse:
                    slot.parameter.grad = slot.gradient
        if due:
            recorded = self._recorded
            assert recorded is not None
            with timeline.span("update", "update", tensors=len(due)), self._portion.timed(due):
                recorded.run(slot.parameter for slot in due)
        for slot, before in zip(due, gradients_before, strict=True):
            # A gradient that only other ranks had stays, as all do until they are cleared.
            if not (slot.absent and not slot.cleared):
                slot.parameter.grad = before

    def bring_up_to_date(self, wanted: Sequence[Slot]) -> Sequence[Slot]:
        """Applies those of ``wanted`` as soon as it can, and puts the wait for them to use.

        Returns:
            The others that came along.
        """
        before = self._pending
        arrived = self._transfer.arrived()
        while not all(map(arrived, wanted)):
            portion = self._portion.of(filter(arrived, self._pending))
            if not portion:
                break
            self.apply(portion)
            arrived = self._transfer.arrived()
        self._transfer.finish(wanted)
        # Some that are read next come along.
        self.apply(dict.fromkeys(
            [slot for slot in wanted if slot.update_pending]
            + self._portion.of(filter(arrived, self._pending))
        ))  # fmt: skip
        return [slot for slot in before if not slot.update_pending and slot not in wanted]

    def clear(self, slot: Slot, set_to_none: bool) -> bool:
        """Clears ``.grad`` of a parameter whose update is outstanding.

        Returns:
            Whether that is done; else the ordinary way has become right.
        """
        parameter = slot.parameter
        if slot.absent:
            # Whether there is a gradient to zero depends on the other ranks; none needs no answer.
            if not set_to_none:
                self.apply([slot])
                return False
            slot.cleared = True
        else:
            with torch._C.DisableTorchFunctionSubclass():  # the answer is known here
                if parameter.grad is not None:
                    parameter.grad = None if set_to_none else torch.zeros_like(slot.gradient)
        return True


def _reasons(optimizer: Optimizer, slots: Sequence[Slot]) -> dict[Slot, str]:
    """Whose update must not wait, since somebody could see that it does, and why.

    Who reaches a parameter's memory otherwise, or what the optimizer keeps about it, may do so at
    any time, without our knowledge. What comes into being later goes through the read guard first.
    """
    parameters = [slot.parameter for slot in slots]
    reasons: dict[Slot, str] = {}
    for slot, reach, state_private in zip(
        slots,
        native.reach(parameters),
        native.state_private(optimizer, parameters),
        strict=True,
    ):
        if (
            slot.sparse
        ):  # its gradient has no place of its own in which it could outlive zero_grad()
            reasons[slot] = overlap.SPARSE
        elif not slot.deferrable:
            reasons[slot] = overlap.UNSEEN
        elif reach != native.Reach.ALONE:
            reasons[slot] = _REACHED[reach]
        elif not state_private:
            reasons[slot] = overlap.STATE_HELD
    return reasons
