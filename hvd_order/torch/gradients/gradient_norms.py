"""What a program may know of the gradients of a step before their sums have arrived.

Where all-reduces are split, the sums of squares and the maxima come with the first halves
(gradient_buffers.py). From these, and the changes that the program has made since, follow the norms
of gradients (torch/sums/norms.py), and whether their elements are finite.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

import torch

from hvd_order._native import _torch as native
from hvd_order.torch.parameters.entry import ParameterEntry
from hvd_order.torch.parameters.entry_table import EntryTable
from hvd_order.torch.parameters.in_flight import NORM_WINDOW, Change, NormWindow
from hvd_order.torch.parameters.read_guard import InFlightGradient
from hvd_order.torch.sums import norms
from hvd_order.torch.sums.registered_model import RegisteredModel

__all__: list[str] = []


class GradientNorms:
    """The norms of one optimizer's gradients in the current step.

    The exchange's lock is held in all methods.

    Attributes:
        asked: norms, or whether elements are finite, were asked for in this step.
        asked_for_maxima: infinity norms were.
    """

    def __init__(self, model: RegisteredModel, table: EntryTable, factor: float) -> None:
        """Starts before the first step; ``factor`` is that of all sums."""
        self.asked = False
        self.asked_for_maxima = False
        self._model = model
        self._use = model.use
        self._table = table
        self._factor = factor
        self._window: NormWindow | None = None
        # By order and dtype; by TensorId; nobody may change them.
        self._of_sums: dict[tuple[float, torch.dtype], Sequence[torch.Tensor]] = {}

    def reset(self) -> None:
        """Forgets the norms of a step, and what was asked in it."""
        self.close()
        self.asked = self.asked_for_maxima = False
        self._of_sums.clear()

    def close(self) -> None:
        """Ends the time in which the program makes changes by the short way (in_flight.py)."""
        if self._window is not None:
            self._window.close()
            self._window = None

    def changed(self, change: Change) -> None:
        """Notes the last change of any gradient."""
        if self._window is not None:
            self._window.factor = change

    def may_have_maxima(self) -> bool:
        """Notes that infinity norms are asked for; returns whether they can be known early."""
        self.asked_for_maxima = self._model.reads_maxima = True
        why_not = self._model.why_no_maxima()
        if why_not is not None:
            self._use.check_may_lack_maxima(why_not)
        return self._model.maxima_fit

    def of(
        self, entries: Sequence[ParameterEntry], order: float, opens: bool
    ) -> list[torch.Tensor] | None:
        """The norms of gradients, 0-d; None where they are not known without the elements.

        Waits for the first halves of all sums of the step.

        Args:
            order: 2 or infinity.
            opens: the program may change gradients by the short way from now on.
        """
        self.asked = True
        if not self._model.has_norms(order):
            return None
        found: list[torch.Tensor] = []
        for entry in entries:
            norm = self._maximum(entry) if order == math.inf else self._norm(entry)
            if norm is None:
                return None
            found.append(norm)
        if opens and self._window is None:
            self._window = self._open(order)
        return native.own_copies(found)

    def are_finite(self, entries: Sequence[ParameterEntry]) -> torch.Tensor | None:
        """Whether all elements of gradients are finite; None: it is not known without them.

        Waits for the first halves of all sums of the step.
        """
        self.asked = True  # also where that decides whether all-reduces will be split
        if not self._model.is_split:
            return None
        found: list[torch.Tensor] = []
        for entry in entries:
            if entry.summed and self._use.is_readable:
                found.append(entry.gradient.isfinite().all())
                continue
            largest = self._maximum(entry) if self._model.has_norms(math.inf) else None
            finite = (
                norms.is_finite(entry, *self._exact_norm(entry))
                if largest is None
                else largest.isfinite()
            )
            if finite is None:
                return None
            found.append(finite)
        return torch.stack(found).all()

    # ---- one gradient -------------------------------------------------------------------------

    def _sums(self, order: float, dtype: torch.dtype) -> Sequence[torch.Tensor]:
        """The norms of the sums after the factor, 0-d, by TensorId."""
        key = order, dtype
        if key not in self._of_sums:
            self._of_sums[key] = self._model.norms_of_sums(order, self._factor, dtype).unbind()
        return self._of_sums[key]

    def _maximum(self, entry: ParameterEntry) -> torch.Tensor | None:
        """The infinity norm of a gradient, which has the bits of that of the elements."""
        if entry.summed and self._use.is_readable:
            of_elements: torch.Tensor = torch.linalg.vector_norm(entry.gradient, math.inf)
            return of_elements
        norm = self._sums(math.inf, entry.gradient.dtype)[entry.tensor]
        # The maximum is the size of an element, and changes as that does.
        for change in entry.changes:
            changed = change.of_norm(norm)
            if changed is None:
                return None
            norm = changed.to(norm.dtype)
        return norm

    def _norm(self, entry: ParameterEntry) -> torch.Tensor | None:
        """The 2-norm of a gradient."""
        of_elements = entry.summed and self._use.is_readable
        if not entry.changes and not of_elements and not self._is_rounded:
            return self._sums(2.0, entry.gradient.dtype)[entry.tensor]
        after = norms.after_changes(entry, *self._exact_norm(entry))
        if after is None:
            return None
        if of_elements:
            return norms.of_complete(entry, *after)
        return norms.in_type(after[0], entry.gradient.dtype)

    @property
    def _is_rounded(self) -> bool:
        """Whether even gradients without changes are products."""
        return self._factor != 1.0

    def _exact_norm(self, entry: ParameterEntry) -> tuple[torch.Tensor, float, bool]:
        """The 2-norm of a sum, and what the gradient is after it, for the functions of norms.py."""
        of_sum = self._sums(2.0, torch.float64)[entry.tensor]
        return of_sum, self._factor, self._use.is_readable

    def _open(self, order: float) -> NormWindow:
        """Opens gradients whose norms of one order are known to the short way of clipping."""
        window = NormWindow()
        is_known = order == math.inf or not self._is_rounded
        with torch._C.DisableTorchFunctionSubclass():
            known: list[torch.Tensor] = []
            with_known: list[list[torch.Tensor]] = []
            for entry in self._table.entries:
                gradient = entry.gradient
                if type(gradient) is not InFlightGradient:
                    continue
                copies: list[torch.Tensor] = []
                if is_known and not entry.changes:
                    known.append(self._sums(order, gradient.dtype)[entry.tensor])
                    with_known.append(copies)
                setattr(gradient, NORM_WINDOW, (window, weakref.ref(entry), order, copies))
            for copies, copy in zip(with_known, native.own_copies(known), strict=True):
                copies.append(copy)
        return window
