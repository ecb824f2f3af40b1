"""One optimizer's gradients in the current step: sent, finished, or given up."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvd_order._native import _torch as native
from hvd_order.base.errors import InvalidUsage
from hvd_order.engine.engine_host import EngineHost
from hvd_order.engine.requests.step_log import StepLog
from hvd_order.torch.gradients.gradient_norms import GradientNorms
from hvd_order.torch.gradients.gradient_transfer import GradientTransfer
from hvd_order.torch.gradients.warm_up import WarmUp
from hvd_order.torch.parameters.entry import ParameterEntry
from hvd_order.torch.parameters.entry_table import EntryTable
from hvd_order.torch.parameters.in_flight import Change
from hvd_order.torch.parameters.read_guard import Guard, arm_gradient, disarm_gradient
from hvd_order.torch.sums.registered_model import RegisteredModel

__all__: list[str] = []


class StepGradients:
    """Ensures that every gradient is sent once a step, as itself or as an absent one.

    The exchange's lock is held in all methods.

    Attributes:
        fresh: no gradient of the coming step has arrived.
        announced: joined ranks were informed of the step, since its gradients may be sent.
        synchronized: all gradients of this step are finished, ``step()`` is to come.
        used_in_flight: norms were asked for, or changes noted, while sums were on their way.
        read: gradients were finished before ``step()`` by other uses.
        broken: a backward pass of this step has ended by an exception.
        cleared: ``zero_grad()`` has set all gradients to None since the last backward pass.
    """

    def __init__(
        self,
        host: EngineHost,
        model: RegisteredModel,
        transfer: GradientTransfer,
        table: EntryTable,
        norms: GradientNorms,
        warm_up: WarmUp,
        log: StepLog,
    ) -> None:
        """Starts before the first step."""
        self.fresh = True
        self.announced = False
        self.synchronized = False
        self.used_in_flight = False
        self.read = False
        self.broken = False
        self.cleared = False
        self._host = host
        self._model = model
        self._transfer = transfer
        self._use = model.use
        self._table = table
        self._norms = norms
        self._warm_up = warm_up
        self._log = log
        self._sender = model.sender  # has the state of the backward pass
        self._first_sent: ParameterEntry | None = None  # of the gradients of this step
        self._kept: list[ParameterEntry] = []  # sent in this pass, reached by the program
        self._begun_at = 0  # the host's count of steps at that time

    @property
    def in_backward(self) -> bool:
        """Whether a backward pass runs that has produced a gradient."""
        return self._sender.in_backward

    def begin(self) -> None:
        """Begins a step: its first gradient has arrived, or there will be none."""
        self._begun_at = self._host.steps
        self._model.begin_step()
        self.fresh = False

    def begin_pass(self) -> None:
        """Handles the first gradient of a backward pass; later ones may bypass Python."""
        entries = self._table.entries
        self._sender.begin_pass(entries, [entry.parameter for entry in entries])
        if any(entry.passes_to_go == 1 for entry in self._table.entries):
            self._announce()

    def _announce(self) -> None:
        if not self.announced:
            self.announced = True
            self._log.note("begin")
            self._model.begin_sending()

    def send(self, entry: ParameterEntry, guard: Guard) -> None:
        """Sends a gradient; a read before it is complete calls ``guard`` to finish it."""
        self._announce()
        self._transfer.send(entry, guard, warm_up=not self._warm_up.order.complete)
        if entry.own is not None:
            self._kept.append(entry)
        if self._first_sent is None and entry.parameter.grad is entry.shown:
            self._first_sent = entry

    def release(self) -> None:
        """Sends a gradient that is held back until the backward pass has ended."""
        self._sender.release()

    def break_pass(self) -> None:
        """Notes that a backward pass has ended by an exception. Without the exchange's lock."""
        self.broken = True
        self._sender.in_backward = False

    def end_pass(self, guard: Guard) -> None:
        """Handles the end of a backward pass, without an exception.

        Gradients that the program reaches without their parameters have their sums from now on, as
        with DDP.
        """
        self._sender.release()
        kept, self._kept = self._kept, []
        cleared, self.cleared = self.cleared, False
        still_kept = []
        for entry in kept:
            if entry.summed:  # a hook has read it
                continue
            # Of a pass' first gradient alone nobody has seen that there was none before. After
            # zero_grad(), what shares its memory is taken for whatever has computed it (static
            # outputs of a captured graph), unless the program keeps other gradients as well.
            may_share = cleared and len(kept) == 1 and entry.own is not entry.gradient
            entry.own = None  # what follows counts who has it
            reach = native.gradient_reach(entry, entry.parameter)
            if reach == native.GradientReach.ALONE or (
                may_share and reach == native.GradientReach.SHARED
            ):
                self._transfer.show_sum(entry, guard)
            else:
                entry.own = entry.parameter.grad
                still_kept.append(entry)
        if still_kept:
            self.send_remaining(guard)
            self._transfer.finish([*still_kept, *self._kept])  # and what no pass renews
            self._kept = []

    def send_remaining(self, guard: Guard) -> None:
        """Sends the rest: gradients set by hand, left from an unfinished pass, or absent."""
        self._announce()
        self._sender.release()
        for entry in self._table.entries:
            if entry.sent:
                continue
            if entry.parameter.grad is not None:
                self.send(entry, guard)
            else:
                self._transfer.send_absent(entry)

    def mark_remaining_absent(self, given_up: bool = False) -> None:
        """Marks all remaining gradients of this rank and step as absent.

        Args:
            given_up: as all ranks must, this rank gives up the step.
        """
        self._announce()
        held = self._sender.take_back() if given_up else None
        self._sender.release()
        for entry in self._table.entries:
            if not entry.sent or (held is not None and entry.placed and entry.tensor == held):
                self._transfer.send_absent(entry, given_up)

    def clone_own_gradients(self) -> None:
        """Moves the program's own gradients to memory that the sums of other gradients do not
        overwrite.
        """
        for entry in self._table.entries:
            if entry.parameter.grad is entry.gradient:
                entry.parameter.grad = entry.gradient.clone()

    def finish_sparse(self) -> None:
        """Exchanges the sparse gradients. Collective during the warm-up, or with any sparse
        gradient.
        """
        if not self._warm_up.order.complete:
            self._log.note("sparse")
            self._transfer.find_sparse(self._table.entries)
        self._transfer.finish_sparse(self._table.entries)

    @property
    def may_stay_in_flight(self) -> bool:
        """Whether uses of gradients may leave them as they are: between ``backward()`` and
        ``step()``.
        """
        if self.fresh or self.in_backward or not self._use.returns_sums:
            return False
        return not self.synchronized or self._model.is_split

    @property
    def stay_armed(self) -> bool:
        """Whether gradients are complete, and their norms still come from the sums of squares."""
        return self.synchronized and self._model.is_split and self._use.is_readable

    def disarm(self) -> None:
        """Makes complete gradients ordinary tensors."""
        if self.stay_armed:
            for entry in self._table.entries:
                if entry.summed:
                    disarm_gradient(entry.gradient)

    @property
    def read_by_norm(self) -> bool:
        """Whether so far in this step gradients were read by their norms alone."""
        return self._norms.asked and not self.read

    def change(self, entries: Sequence[ParameterEntry], change: Change, guard: Guard) -> bool:
        """Sends the rest, and notes a change of gradients on their way; returns whether that is
        possible.
        """
        if not self.use_in_flight(guard):
            return False
        # The change is made on the home streams, perhaps before step() has ordered them behind the
        # program's others.
        streams = self._transfer.streams
        value = getattr(change, "value", None)
        streams.wait_for_current([value] if isinstance(value, torch.Tensor) else [])
        with torch.no_grad(), native.OnHomeStreams(streams):
            for entry in entries:
                entry.changes.append(change)
                if entry.summed:
                    entry.make_changes()
        self._norms.changed(change)
        return True

    def use_in_flight(self, guard: Guard) -> bool:
        """Notes that the program uses gradients on their way; returns whether it may."""
        if not self.may_stay_in_flight:
            return False
        if not self.used_in_flight and not self.synchronized:
            if any(entry.sparse for entry in self._table.entries):
                return False  # reads complete the sparse gradients, too
            self.send_remaining(guard)
            self.used_in_flight = True
        return True

    def show_all(self, guard: Guard) -> None:
        """Sends the rest, and gives every parameter that any rank used a gradient in flight."""
        self.send_remaining(guard)
        for entry in self._model.find_used():
            entry.parameter.grad = entry.gradient
            arm_gradient(entry.gradient, guard)

    def finish(self, guard: Guard) -> None:
        """Sends the rest and waits until all sums are in ``.grad``."""
        self._norms.close()
        self.read = not self.used_in_flight
        self.send_remaining(guard)
        self.finish_sparse()
        self._transfer.finish(self._table.entries, stay_armed=self._model.is_split)
        for entry in self._table.entries:
            if entry.absent and entry.used and not entry.sparse:
                entry.parameter.grad = entry.gradient
        self.synchronized = True

    def reset(self) -> None:
        """Resets the state of a step whose gradients have no use; those sent must be finished."""
        for entry in self._table.entries:
            # What rounding has lost of a gradient without use is owed to nobody; and a step that
            # GradScaler leaves out is followed by one with another scale.
            if entry.sent and entry.residual is not None:
                entry.residual.zero_()
        self._reset()

    def _reset(self) -> None:
        self._norms.reset()
        self.disarm()
        self.fresh = True
        self.announced = False
        self.synchronized = False
        self.used_in_flight = False
        self.read = False
        self.broken = False
        self._sender.in_backward = False
        self._first_sent = None
        self._kept = []
        self._table.begin_step()

    def end(self) -> None:
        """Ends the step after ``step()`` has used the gradients."""
        self._log.note("end")
        self._model.read_by_norm = self.read_by_norm
        self._reset()
        self._host.step_taken()

    def drop(self) -> None:
        """Waits for the sent gradients of a step that will not come, and resets the step."""
        self._sender.release()
        self._transfer.finish(self._table.entries, given_up=True)
        self._use.end_step(self._table.entries)
        self.reset()

    def give_up(self) -> None:
        """Same as `drop`, but informs the other ranks: this rank sends no more of the step."""
        self._log.note("give_up")
        self.mark_remaining_absent(given_up=True)
        self.drop()

    def were_cleared(self) -> bool:
        """Whether gradients of this step were cleared after they had been sent.

        The critic of a GAN gets gradients from the generator's loss and clears them, unused, with
        ``module.zero_grad()``. Checked once a backward pass; code that clears one gradient clears
        all.
        """
        if self._sender.in_backward or self.synchronized or self._first_sent is None:
            return False
        gradient = self._first_sent.parameter.grad
        if gradient is None:
            return True
        return gradient is not self._first_sent.shown

    def set_by_hand(self) -> bool:
        """Whether the program has set gradients that no backward pass produced."""
        return any(
            entry.is_set_by_hand
            for entry in self._table.entries
            if not entry.sparse and not entry.update_pending
        )

    def replaced(self) -> bool:
        """Whether the program has replaced gradients of this step by other tensors or None."""
        return any(
            entry.parameter.grad is not entry.shown
            for entry in self._table.entries
            if entry.sent and not entry.absent and not entry.sparse
        )

    def check_not_given_up(self, entries: Sequence[ParameterEntry]) -> None:
        """Raises InvalidUsage if another rank has given up the step."""
        self._transfer.check_not_given_up(entries)

    def check_hooks(self) -> None:
        """Raises InvalidUsage if a parameter has lost its gradient hook.

        A reader before ``step()``, such as gradient clipping, would get this rank's own gradient.
        """
        entries = self._table.entries
        for entry, hooked in zip(
            entries, native.hooked([s.parameter for s in entries]), strict=True
        ):
            if not hooked:
                raise InvalidUsage(
                    f"parameter '{entry.name}' has been given another tensor "
                    "(torch.utils.swap_tensors, or a conversion of the model with "
                    "torch.__future__.set_swap_module_params_on_conversion), and has lost what "
                    "sends its gradient; do that before DistributedOptimizer"
                )

    def have_no_use(self) -> bool:
        """Whether these gradients have no use: their backward pass has ended by an exception, they
        are a by-product, or none was sent.

        A by-product is a gradient that arrived before another optimizer has stepped.
        """
        return (
            self.broken
            or self._host.steps != self._begun_at
            or not any(s.sent for s in self._table.entries)
        )
