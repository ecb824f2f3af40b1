"""What a model's first two steps teach: who reads what when, and how its gradients are cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hvd_order.torch import followed_plan, misuse
from hvd_order.torch.consumption import ReadOrder
from hvd_order.torch.engine_host import EngineHost
from hvd_order.torch.gradient_transfer import GradientTransfer
from hvd_order.torch.read_guard import Guard, arm_parameter, disarm_parameter
from hvd_order.torch.slot import Slot
from hvd_order.torch.tuning import Tuning

__all__: list[str] = []


class Learning:
    """Registers the model: first in the order of its parameters, then in consumption order.

    The exchange's lock is held in all methods.

    Attributes:
        order: who was read when.
    """

    def __init__(self, host: EngineHost, transfer: GradientTransfer) -> None:
        """Nothing is registered."""
        self.order = ReadOrder()
        self._host = host
        self._transfer = transfer
        self._tuning: Tuning | None = None

    def start(self, slots: Sequence[Slot]) -> None:
        """Begins, or begins anew when parameters have come. Collective."""
        self.order = ReadOrder()
        self._register(slots, on_servers=False)

    def _register(self, order: Sequence[Slot], on_servers: bool) -> None:
        for slot in order:
            slot.placed = not slot.sparse
        dense = [slot for slot in order if slot.placed]
        self._transfer.model.register(dense, observed=self.order.complete, on_servers=on_servers)

    def gradient_came(self, slots: Sequence[Slot]) -> None:
        """Ends the watch: whoever reads from now on reads for the backward pass."""
        if self.order.watching:
            self.order.close()
            for slot in slots:
                disarm_parameter(slot.parameter)

    def step_taken(self, slots: Sequence[Slot], guard: Guard, flush: Callable[[], object]) -> None:
        """Watches who reads what after the first step, and takes that as order after the second.

        Afterwards slice size and credit are tried out. Collective in some of the steps.

        Args:
            guard: is to note who reads.
            flush: finishes all updates.
        """
        if self.order.complete:
            if self._tuning is not None:
                self._tuning.step_taken(flush)
        elif not self.order.started:
            self.order.start()
            for slot in slots:
                arm_parameter(slot.parameter, guard)
        else:
            self._take_order(slots)

    def _take_order(self, slots: Sequence[Slot]) -> None:
        seen = dict.fromkeys(self.order.finish())
        for slot in slots:
            # A sparse gradient has no place of its own in which it could outlive zero_grad().
            slot.deferrable = slot in seen and not slot.sparse
        # What nobody was seen reading is updated in step(): it is needed first of all.
        unseen = [slot for slot in slots if slot not in seen]
        plan = followed_plan.fitting(self._host, slots)
        if self._transfer.model.server_update is not None:
            misuse.refuse_sparse([slot.name for slot in slots if slot.sparse])
        self._register(followed_plan.in_order(plan, unseen, list(seen)), on_servers=True)
        # One engine has one credit: with several optimizers the first one's choice is for all.
        if self._transfer.model.alone and not self._host.tuned:
            self._host.tuned = True
            device = slots[0].parameter.device
            self._tuning = Tuning(self._host, self._transfer.model, device, plan)
