"""One optimizer's gradients in the step that goes on: sent, finished, or given up."""

from __future__ import annotations

from hvd_order import _torch as native
from hvd_order.c10d.engine.engine_host import EngineHost
from hvd_order.c10d.requests.step_log import StepLog
from hvd_order.errors import InvalidUsage
from hvd_order.torch.gradients.gradient_transfer import GradientTransfer
from hvd_order.torch.gradients.warm_up import Learning
from hvd_order.torch.parameters.entry import Slot
from hvd_order.torch.parameters.entry_table import SlotTable
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
        table: SlotTable,
        learning: Learning,
        log: StepLog,
    ) -> None:
        """No step has begun."""
        self.fresh = True
        self.announced = False
        self.synchronized = False
        self._host = host
        self._transfer = transfer
        self._table = table
        self._learning = learning
        self._log = log
        self._sender = transfer.model.sender  # knows whether a backward pass runs
        self._first_sent: Slot | None = None  # of the gradients of this step
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
        if any(slot.passes_to_go == 1 for slot in self._table.slots):
            self._announce()

    def _announce(self) -> None:
        if not self.announced:
            self.announced = True
            self._log.note("begin")

    def send(self, slot: Slot, guard: Guard) -> None:
        """Sends a gradient; ``guard`` is asked to finish it when somebody reads it meanwhile."""
        self._announce()
        self._transfer.send(slot, guard, learning=not self._learning.order.complete)
        if self._first_sent is None and slot.parameter.grad is slot.gradient:
            self._first_sent = slot

    def send_the_rest(self, guard: Guard) -> None:
        """Sends what no hook has sent: set by hand, left from an unfinished pass, or absent."""
        self._announce()
        for slot in self._table.slots:
            if slot.sent:
                continue
            if slot.parameter.grad is not None:
                self.send(slot, guard)
            else:
                self._transfer.send_absent(slot)

    def send_nothing(self) -> None:
        """This rank has no more gradients for this step."""
        self._announce()
        for slot in self._table.slots:
            if not slot.sent:
                self._transfer.send_absent(slot)

    def spare_own(self) -> None:
        """Moves the program's own gradients to where the sums of others do not overwrite them."""
        for slot in self._table.slots:
            if slot.parameter.grad is slot.gradient:
                slot.parameter.grad = slot.gradient.clone()

    def finish_sparse(self) -> None:
        """Exchanges the sparse gradients. Collective while the model is learnt, or with any."""
        if not self._learning.order.complete:
            self._log.note("sparse")
            self._transfer.find_sparse(self._table.slots)
        self._transfer.finish_sparse(self._table.slots)

    def finish(self, guard: Guard) -> None:
        """Sends the rest and waits for all sums; they are in ``.grad`` then."""
        self.send_the_rest(guard)
        self.finish_sparse()
        self._transfer.finish(self._table.slots)
        for slot in self._table.slots:
            if slot.absent and slot.used and not slot.sparse:
                slot.parameter.grad = slot.gradient
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
        self._transfer.finish(self._table.slots)
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
            slot.parameter.grad is not None and slot.parameter.grad is not slot.gradient
            for slot in self._table.slots
            if not slot.sparse and not slot.update_pending
        )

    def replaced(self) -> bool:
        """Whether the program has put something else where gradients of this step were, or None."""
        return any(
            slot.parameter.grad is not slot.gradient
            for slot in self._table.slots
            if slot.sent and not slot.absent and not slot.sparse
        )

    def check_hooks(self) -> None:
        """Raises InvalidUsage where gradients come unseen: who reads one before ``step()``, to clip
        it say, would find this rank's own.
        """
        slots = self._table.slots
        for slot, hooked in zip(slots, native.hooked([s.parameter for s in slots]), strict=True):
            if not hooked:
                raise InvalidUsage(
                    f"parameter '{slot.name}' has been given another tensor "
                    "(torch.utils.swap_tensors, or a conversion of the model with "
                    "torch.__future__.set_swap_module_params_on_conversion), and has lost what "
                    "sends its gradient; do that before DistributedOptimizer"
                )

    def unwanted(self) -> bool:
        """Whether nobody waits for these gradients: a by-product, or none of them was sent.

        A by-product is what came before another optimizer has stepped.
        """
        return self._host.steps != self._begun_at or not any(s.sent for s in self._table.slots)
