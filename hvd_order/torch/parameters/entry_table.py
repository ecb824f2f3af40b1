"""The parameters of one optimizer: those that are trained, and those that are frozen so far."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hvd_order.torch.parameters.entry import ParameterEntry

__all__: list[str] = []


class EntryTable:
    """The entries of one optimizer.

    Attributes:
        entries: of the trainable parameters.
        passes: backward passes whose gradients add up before they are exchanged.
    """

    def __init__(self, passes: int) -> None:
        """Begins empty."""
        self.entries: list[ParameterEntry] = []
        self.passes = passes
        self._frozen: list[ParameterEntry] = []
        self._by_parameter: dict[int, ParameterEntry] = {}

    @property
    def everything(self) -> list[ParameterEntry]:
        """All entries, those of frozen parameters as well."""
        return [*self.entries, *self._frozen]

    def of(self, parameter: torch.Tensor) -> ParameterEntry | None:
        """The entry of a parameter; None if that is not trained here."""
        return self._by_parameter.get(id(parameter))

    def add(self, entries: Iterable[ParameterEntry]) -> None:
        """Takes in trainable parameters."""
        for entry in entries:
            entry.begin_step(self.passes)
            self.entries.append(entry)
            self._by_parameter[id(entry.parameter)] = entry

    def add_frozen(self, entries: Iterable[ParameterEntry]) -> None:
        """Keeps parameters that may become trainable later."""
        self._frozen += entries

    def take_unfrozen(self) -> list[ParameterEntry]:
        """Those of the frozen ones that have become trainable; they are forgotten here."""
        trainable = [entry for entry in self._frozen if entry.parameter.requires_grad]
        if trainable:
            self._frozen = [entry for entry in self._frozen if entry not in trainable]
        return trainable

    def begin_step(self) -> None:
        """Prepares entries for the gradients of a step, except those with a deferred update."""
        for entry in self.entries:
            if not entry.update_pending:
                entry.begin_step(self.passes)

    def set_passes(self, passes: int) -> None:
        """Changes the number of backward passes, for gradients that have not been sent as well."""
        self.passes = passes
        for entry in self.entries:
            if not entry.sent:
                entry.passes_to_go = passes
