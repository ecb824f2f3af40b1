"""One optimizer's gradients in the step that goes on: sent, finished, or given up."""

from __future__ import annotations

from hvd_order import _torch as native
from hvd_order.c10d.engine.engine_host import EngineHost
from hvd_order.c10d.requests.step_log import StepLog
from hvd_order.errors import InvalidUsage
from hvd_order.torch.gradients.gradient_transfer import GradientTransfer
from hvd_order.torch.gradients.warm_up import WarmUp
from hvd_order.torch.parameters.entry import ParameterEntry
from hvd_order.torch.parameters.entry_table import EntryTable
from hvd_order.torch.parameters.read_guard import Guard

__all__: list[str] = []


class StepGradients:
    """Sees to it that every gradient is sent once a step, by itself or as an absent one.

    The exchange's lock is held in all methods.

    Attributes:
        fresh: no gradient of the coming step has come.
        announced: ranks that have joined were told of the step, since gradients of it may be sent.
        synchronized: all gradients of this step are finished, ``step()`` is to come.
    """

    def __init__(
        self,
        host: EngineHost,
        transfer: GradientTransfer,
        table: EntryTable,
        warm_up: WarmUp,
        log: StepLog,
    ) -> None:
        """No step has begun."""
        self.fresh = True
        self.announced = False
        self.synchronized = False
        self._host = host
        self._transfer = transfer
        self._table = table
        self._warm_up = warm_up
        self._log = log
        self._sender = transfer.model.sender  # knows whether a backward pass runs
        self._first_sent: ParameterEntry | None = None  # of the gradients of this step
        self._begun_at = 0  # the host's count of steps then

    @property
    def in_backward(self) -> bool:
        """Whether a backward pass runs that has produced a gradient."""
        return self._sender.in_backward

    def begin(self) -> None:
        """The first gradient after ``step()`` has come, or it is known that there is none."""
        self._begun_at = self._host.steps
        self._transfer.model.raise_use_flags()
        self.fresh = False

    def begin_pass(self) -> None:
        """A backward pass has given its first gradient; what comes now may be sent unseen."""
        if any(entry.passes_to_go == 1 for entry in self._table.entries):
            self._announce()

    def _announce(self) -> None:
        if not self.announced:
            self.announced = True
            self._log.note("begin")

    def send(self, entry: ParameterEntry, guard: Guard) -> None:
        """Sends a gradient; ``guard`` is asked to finish it when somebody reads it meanwhile."""
        self._announce()
        self._transfer.send(entry, guard, warm_up=not self._warm_up.order.complete)
        if self._first_sent is None and entry.parameter.grad is entry.gradient:
            self._first_sent = entry

    def send_the_rest(self, guard: Guard) -> None:
        """Sends what no hook has sent: set by hand, left from an unfinished pass, or absent."""
        self._announce()
        for entry in self._table.entries:
            if entry.sent:
                continue
            if entry.parameter.grad is not None:
                self.send(entry, guard)
            else:
                self._transfer.send_absent(entry)

    def send_nothing(self) -> None:
        """This rank has no more gradients for this step."""
        self._announce()
        for entry in self._table.entries:
            if not entry.sent:
                self._transfer.send_absent(entry)

    def spare_own(self) -> None:
        """Moves the program's own gradients to where the sums of others do not overwrite them."""
        for entry in self._table.entries:
            if entry.parameter.grad is entry.gradient:
                entry.parameter.grad = entry.gradient.clone()

    def finish_sparse(self) -> None:
        """Exchanges the sparse gradients. Collective while the model is learnt, or with any."""
        if not self._warm_up.order.complete:
            self._log.note("sparse")
            self._transfer.find_sparse(self._table.entries)
        self._transfer.finish_sparse(self._table.entries)

    def finish(self, guard: Guard) -> None:
        """Sends the rest and waits for all sums; they are in ``.grad`` then."""
        self.send_the_rest(guard)
        self.finish_sparse()
        self._transfer.finish(self._table.entries)
        for entry in self._table.entries:
            if entry.absent and entry.used and not entry.sparse:
                entry.parameter.grad = entry.gradient
        self.synchronized = True

    def reset(self) -> None:
        """Forgets the step; what was sent in it has been finished."""
        self.fresh = True
        self.announced = False
        self.synchronized = False
        self._sender.in_backward = False
        self._first_sent = None
        self._table.begin_step()

    def end(self) -> None:
        """``step()`` has used the gradients."""
        self._log.note("end")
        self.reset()
        self._host.step_taken()

    def drop(self) -> None:
        """Lets what was sent of a step that will not come arrive, and forgets it."""
        self._transfer.finish(self._table.entries)
        self.reset()

    def give_up(self) -> None:
        """The same where the others are told: this rank sends no more of it."""
        self._log.note("give_up")
        self.send_nothing()
        self.drop()

    def cleared_by_owner(self) -> bool:
        """Whether gradients of this step were cleared after they had been sent.

        The critic of a GAN gets gradients from the generator's loss and clears them, unused, with
        ``module.zero_grad()``. Asked once a backward pass; who clears one gradient clears all.
        """
        if self._sender.in_backward or self.synchronized or self._first_sent is None:
            return False
        gradient = self._first_sent.parameter.grad
        if gradient is None:
            return True
        # backward(create_graph=True) adds to a gradient by replacing it
        return gradient is not self._first_sent.gradient and not gradient.requires_grad

    def set_by_hand(self) -> bool:
        """Whether the program has put gradients where no backward pass did."""
        return any(
            entry.parameter.grad is not None and entry.parameter.grad is not entry.gradient
            for entry in self._table.entries
            if not entry.sparse and not entry.update_pending
        )

    def replaced(self) -> bool:
        """Whether the program has put something else where gradients of this step were, or None."""
        return any(
            entry.parameter.grad is not entry.gradient
            for entry in self._table.entries
            if entry.sent and not entry.absent and not entry.sparse
        )

    def check_hooks(self) -> None:
        """Raises InvalidUsage where gradients come unseen: who reads one before ``step()``, to clip
        it say, would find this rank's own.
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

    def unwanted(self) -> bool:
        """Whether nobody waits for these gradients: a by-product, or none of them was sent.

        A by-product is what came before another optimizer has stepped.
        """
        return self._host.steps != self._begun_at or not any(s.sent for s in self._table.entries)
