"""The parameters of one optimizer, trainable and currently frozen."""

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
        """Starts empty."""
        self.entries: list[ParameterEntry] = []
        self.passes = passes
        self._frozen: list[ParameterEntry] = []
        self._by_parameter: dict[int, ParameterEntry] = {}
        self._by_gradient: dict[int, ParameterEntry] = {}

    @property
    def everything(self) -> list[ParameterEntry]:
        """All entries, including those of frozen parameters."""
        return [*self.entries, *self._frozen]

    def of(self, parameter: torch.Tensor) -> ParameterEntry | None:
        """The entry of a parameter; None if the parameter is not trained here."""
        return self._by_parameter.get(id(parameter))

    def of_gradient(self, gradient: torch.Tensor) -> ParameterEntry | None:
        """The entry whose ``gradient`` this is; None if there is none."""
        entry = self._by_gradient.get(id(gradient))
        if entry is None or entry.gradient is not gradient:  # gradients move when buffers change
            self._by_gradient = {id(each.gradient): each for each in self.entries}
            entry = self._by_gradient.get(id(gradient))
        return entry

    def add(self, entries: Iterable[ParameterEntry]) -> None:
        """Adds trainable parameters."""
        for entry in entries:
            entry.begin_step(self.passes)
            self.entries.append(entry)
            self._by_parameter[id(entry.parameter)] = entry

    def add_frozen(self, entries: Iterable[ParameterEntry]) -> None:
        """Adds frozen parameters, which may become trainable later."""
        self._frozen += entries

    def take_unfrozen(self) -> list[ParameterEntry]:
        """Removes and returns the frozen parameters that have become trainable."""
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
        """Changes the number of backward passes, also for gradients that have not been sent."""
        self.passes = passes
        for entry in self.entries:
            if not entry.sent:
                entry.passes_to_go = passes
