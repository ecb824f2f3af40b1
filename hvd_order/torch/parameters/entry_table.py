"""The parameters of one optimizer: those that are trained, and those that are frozen so far."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hvd_order.torch.parameters.entry import Slot

__all__: list[str] = []


class SlotTable:
    """The slots of one optimizer.

    Attributes:
        slots: of the trainable parameters.
        passes: backward passes whose gradients add up before they are exchanged.
    """

    def __init__(self, passes: int) -> None:
        """Begins empty."""
        self.slots: list[Slot] = []
        self.passes = passes
        self._frozen: list[Slot] = []
        self._by_parameter: dict[int, Slot] = {}

    @property
    def everything(self) -> list[Slot]:
        """All slots, those of frozen parameters as well."""
        return [*self.slots, *self._frozen]

    def of(self, parameter: torch.Tensor) -> Slot | None:
        """The slot of a parameter; None if that is not trained here."""
        return self._by_parameter.get(id(parameter))

    def add(self, slots: Iterable[Slot]) -> None:
        """Takes in trainable parameters."""
        for slot in slots:
            slot.begin_step(self.passes)
            self.slots.append(slot)
            self._by_parameter[id(slot.parameter)] = slot

    def add_frozen(self, slots: Iterable[Slot]) -> None:
        """Keeps parameters that may become trainable later."""
        self._frozen += slots

    def take_unfrozen(self) -> list[Slot]:
        """Those of the frozen ones that have become trainable; they are forgotten here."""
        trainable = [slot for slot in self._frozen if slot.parameter.requires_grad]
        if trainable:
            self._frozen = [slot for slot in self._frozen if slot not in trainable]
        return trainable

    def begin_step(self) -> None:
        """Makes slots ready for the gradients of a step, except where an update is outstanding."""
        for slot in self.slots:
            if not slot.update_pending:
                slot.begin_step(self.passes)

    def set_passes(self, passes: int) -> None:
        """Changes the number of backward passes, for gradients that have not been sent as well."""
        self.passes = passes
        for slot in self.slots:
            if not slot.sent:
                slot.passes_to_go = passes
