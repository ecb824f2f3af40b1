"""Warm-up of a model: observes the order of readers, and chooses the slice settings."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence

from hvd_order.base.plan.plan_file import Plan
from hvd_order.engine.model_channel import ModelChannel
from hvd_order.torch.gradients import followed_plan
from hvd_order.torch.gradients.tuning import Tuning
from hvd_order.torch.parameters.compiled_regions import Enter
from hvd_order.torch.parameters.consumption import ReadOrder
from hvd_order.torch.parameters.entry import ParameterEntry
from hvd_order.torch.parameters.hidden_readers import HiddenReaders
from hvd_order.torch.parameters.read_guard import Guard, arm_parameter, disarm_parameter
from hvd_order.torch.sums.registered_model import RegisteredModel

__all__: list[str] = []

_log = logging.getLogger("hvd_order")
_FIRST_TALK = 4  # in steps, then doubling; the two steps before are watched


class WarmUp:
    """Registers the model: first in the order of its parameters, then in consumption order.

    The exchange's lock is held in all methods.

    Attributes:
        order: the observed order of reads.
        hidden: parameters that are read invisibly to Python.
        read_elsewhere: another thread has read parameters than the one that calls ``step()``. It
            may be in the middle of an operator when ``step()`` would lock them.
    """

    def __init__(
        self, channel: ModelChannel, model: RegisteredModel, enter: Enter, separable: bool
    ) -> None:
        """Starts without a registration.

        Args:
            channel: of the model.
            enter: finishes parameters that are about to be read.
            separable: whether updates may wait for their readers.
        """
        self.order = ReadOrder()
        self.hidden = HiddenReaders(enter)
        self._channel = channel
        self._host = channel.host
        self._model = model
        self._separable = separable
        self._tuning: Tuning | None = None
        self._steps = 0  # since the start, or the last new start
        self._next_talk = _FIRST_TALK
        self._in_use: list[ParameterEntry] = []
        self.read_elsewhere = False
        self._stepping = threading.current_thread()
        self._read_lately: list[ParameterEntry] = []

    def start(self, entries: Sequence[ParameterEntry]) -> None:
        """Begins, or begins anew when parameters were added. Collective."""
        self.order = ReadOrder()
        self.hidden.close()
        self._steps = 0
        self._next_talk = _FIRST_TALK
        for entry in entries:
            entry.deferrable = False
            entry.size_bytes = entry.parameter.nbytes  # may have another shape or dtype
        self._register(entries)

    def _register(self, order: Sequence[ParameterEntry]) -> None:
        for entry in order:
            entry.placed = not entry.sparse
        dense = [entry for entry in order if entry.placed]
        with self._channel.turn():
            self._model.register(dense, observed=self.order.complete)
        self._in_use = list(order)

    # ---- reads --------------------------------------------------------------------------------

    def was_read(self, entry: ParameterEntry) -> None:
        """Records a read of the armed ``entry`` from Python, or a coming read in a module."""
        # A thread that has ended cannot step while this one reads.
        if threading.get_ident() != self._stepping.ident and self._stepping.is_alive():
            self.read_elsewhere = True
        if self.order.watching:
            self.order.note(entry)
            self.hidden.note(entry)
            self._read_lately.append(entry)

    def end(self, entries: Sequence[ParameterEntry]) -> None:
        """Ends the watch, if there is one; no further reads are recorded."""
        self.order.close()
        self.hidden.stop()
        for entry in entries:
            if not entry.update_pending:
                disarm_parameter(entry.parameter)

    def gradient_came(self, entries: Sequence[ParameterEntry]) -> None:
        """Ends the watch: from now on, reads belong to the backward pass."""
        for entry in entries:
            disarm_parameter(entry.parameter)
        if self.order.watching:
            found = self.hidden.prove()
            for entry, reads in found.finished_at.items():
                self.order.note(entry, reads)
            self.order.close()
            self._read_lately.clear()
            for entry in self.order.seen:
                entry.deferrable = entry not in found.unknown

    def watch_again(self, entries: Iterable[ParameterEntry], guard: Guard) -> None:
        """During the watch, watches again entries whose updates came before their readers."""
        if self.order.watching:
            for entry in entries:
                arm_parameter(entry.parameter, guard)

    def _watch(self, entries: Sequence[ParameterEntry], guard: Guard) -> None:
        self.order.watch()
        self.watch_again(entries, guard)

        def boundary() -> int:
            self.watch_again(self._read_lately, guard)
            self._read_lately.clear()
            return self.order.reads

        self.hidden.watch(entries, boundary)

    # ---- steps --------------------------------------------------------------------------------

    def step_taken(
        self, entries: Sequence[ParameterEntry], guard: Guard, flush: Callable[[], object]
    ) -> None:
        """Watches the readers after the first step, and takes their order after the second.

        Afterwards slice size and credit are tried out, and the order is confirmed. Collective in
        some of the steps.

        Args:
            guard: records the readers.
            flush: applies all updates.
        """
        self._steps += 1
        self._stepping = threading.current_thread()
        if self._steps == 1:
            self._watch(entries, guard)
            return
        if self._steps == 2:
            self._take_order(entries)
        else:
            if self._tuning is not None:
                self._tuning.step_taken(flush)
            if self._confirms and self._next_talk - self._steps in (0, 1):
                self._confirm_order(flush)
        if self._confirms and self._next_talk - self._steps in (1, 2):
            self._watch(entries, guard)

    @property
    def _confirms(self) -> bool:
        """Whether the order may change. A plan fixes it, or the first one if others sum."""
        return self._host.plan is None and self._host.choice.ranks_sum

    def _take_order(self, entries: Sequence[ParameterEntry]) -> None:
        # ``step()`` updates the parameters without a known reader: they are needed first.
        unseen = [entry for entry in entries if not entry.deferrable]
        seen = [entry for entry in self.order.seen if entry.deferrable]
        plan = followed_plan.fitting(self._host, entries)
        order = followed_plan.in_order(plan, unseen, seen)
        self.order.take(order)
        with self._channel.turn():
            self._settle_order(entries, order, plan)

    def _settle_order(
        self,
        entries: Sequence[ParameterEntry],
        order: Sequence[ParameterEntry],
        plan: Plan | None,
    ) -> None:
        """Registers the order, and begins to choose settings. Collective, in the engine's turn."""
        model = self._model
        device = entries[0].parameter.device
        if model.use.in_halves:
            model.use_advised_settings(device)
        self._register(order)
        if model.use.in_halves:
            return
        # One engine has one credit: with several optimizers, the first one's choice holds for all.
        if model.only_model and not self._host.tuning_begun:
            self._host.tuning_begun = True
            self._tuning = Tuning(self._channel, model, device, plan, self._separable)
        else:
            model.split_if_of_use(self._separable)

    def _confirm_order(self, flush: Callable[[], object]) -> None:
        """After 4, 8, 16, ... steps, takes another order if the two steps before have shown it; and
        maxima, if infinity norms have been read without them.
        """
        is_right = self.order.confirm()
        if self._steps < self._next_talk:
            return
        self._next_talk *= 2
        is_other = is_right and self.order.estimate != self._in_use
        wishes = self._channel.gather("the order of reads", (is_other, self._model.lacks_maxima))
        is_other = wishes[0][0]  # rank 0's order holds for all ranks
        if is_other or all(lacks for _, lacks in wishes):
            flush()
            self._register(self.order.estimate if is_other else self._in_use)
        if is_other:
            _log.info("parameters are read in another order than in step 2: it is taken")
