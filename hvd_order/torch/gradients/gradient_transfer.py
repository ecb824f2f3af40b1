"""Puts gradients on the wire and takes their sums off it.

What is done to a gradient on its way: prescale, compress, sum over the ranks, decompress,
postscale. A rank without a gradient sends zeros and a use flag of 0 in its place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import torch

from hvd_order.c10d.engine import registration, timeline
from hvd_order.c10d.engine.engine_host import EngineHost
from hvd_order.c10d.process_sets import ProcessSet
from hvd_order.errors import InvalidUsage
from hvd_order.torch.collectives.compression import Compressor
from hvd_order.torch.gradients import sparse
from hvd_order.torch.gradients.registered_model import RegisteredModel
from hvd_order.torch.parameters.entry import Slot
from hvd_order.torch.parameters.read_guard import (
    Guard,
    InFlightGradient,
    arm_gradient,
    disarm_gradient,
)

__all__: list[str] = []


class GradientTransfer:
    """Moves the gradients of one optimizer.

    Attributes:
        model: where they travel.
    """

    def __init__(
        self,
        host: EngineHost,
        compression: type[Compressor],
        prescale: float,
        postscale: float,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        """Moves nothing yet.

        Args:
            prescale: factor for each rank's gradient before the sum.
            postscale: factor for the sum.
            sparse_as_dense: exchange sparse gradients as dense ones.
            process_set: that of ``host``.
        """
        self.model = RegisteredModel(host, compression, prescale)
        self._host = host
        self._compression = compression
        self._prescale = prescale
        self._postscale = postscale
        self._sparse_as_dense = sparse_as_dense
        self._process_set = process_set

    # ---- out ----------------------------------------------------------------------------------

    def send(self, slot: Slot, guard: Guard, learning: bool) -> None:
        """Puts ``parameter.grad`` in its place and hands it to the engine.

        Args:
            guard: asked to finish when somebody reads the gradient meanwhile.
            learning: the model's parameters are still being watched, so one may turn out sparse.
        """
        gradient = slot.parameter.grad
        assert gradient is not None
        if type(gradient) is InFlightGradient:
            raise InvalidUsage(
                f"parameter '{slot.name}' belongs to two distributed optimizers; drop the old one "
                "before backward()"
            )
        if gradient.is_sparse:
            if not self._sparse_as_dense:
                self._leave_to_sparse(slot, learning)
                return
            gradient = gradient.to_dense()
        if not slot.in_place and not self.model.put_in_place([slot]):
            raise InvalidUsage(
                f"parameter '{slot.name}' became {slot.parameter.dtype} on "
                f"{slot.parameter.device} in the middle of a step; convert the model between "
                "step() and the next backward()"
            )
        slot.sent = True
        slot.ready_s = time.monotonic()
        done = (
            gradient is not slot.wire
            and slot.gradient is slot.wire
            and self.model.sender.send(slot, gradient)
        )
        if not done:
            with torch.no_grad():
                self._put_on_wire(slot, gradient)
            self.model.hand_over(slot)
        slot.parameter.grad = slot.gradient
        arm_gradient(slot.gradient, guard)

    def _put_on_wire(self, slot: Slot, gradient: torch.Tensor) -> None:
        if gradient is slot.wire:
            if self._prescale != 1.0:
                gradient.mul_(self._prescale)
        elif slot.gradient is slot.wire:
            torch.mul(gradient, self._prescale, out=slot.wire)
        else:
            if gradient is not slot.gradient:
                slot.gradient.copy_(gradient)
            if self._prescale != 1.0:
                slot.gradient.mul_(self._prescale)
            travelling, slot.compression_context = self._compression.compress(slot.gradient)
            slot.wire.copy_(travelling)

    def _leave_to_sparse(self, slot: Slot, learning: bool) -> None:
        if not slot.sparse and not learning:
            raise InvalidUsage(
                f"the gradient of '{slot.name}' became sparse after the first two steps; pass "
                "sparse_as_dense=True to DistributedOptimizer"
            )
        if slot.placed:
            self.send_absent(slot)  # its place in the buffers must not hold up its neighbours
        slot.sent = True

    def send_absent(self, slot: Slot) -> None:
        """Tells the others that this rank has no gradient for the parameter."""
        slot.absent = True
        slot.sent = True
        if not slot.placed:
            return
        with torch.no_grad():
            slot.wire.zero_()
            slot.use_flag.zero_()
        slot.ready_s = time.monotonic()
        self.model.hand_over(slot)

    # ---- in -----------------------------------------------------------------------------------

    def finish(self, slots: Iterable[Slot]) -> None:
        """Waits for the sums and makes them visible. Raises the engine's failure."""
        travelling = self.model.travelling()
        for slot in slots:
            if slot.finished or not slot.sent:
                continue
            if slot.placed and travelling(slot):
                with timeline.span("wait", slot.name):
                    self.model.wait(slot)
            if not slot.sparse:
                self._take_off_wire(slot)
            slot.finished = True

    def arrived(self) -> Callable[[Slot], bool]:
        """Which gradients can be finished at this moment without a wait."""
        travelling = self.model.travelling()
        return lambda slot: slot.finished or not travelling(slot)

    def _take_off_wire(self, slot: Slot) -> None:
        # Other threads' readers find it on its way until it is complete.
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            try:
                self._complete(slot)
            finally:
                disarm_gradient(slot.gradient)

    def _complete(self, slot: Slot) -> None:
        if slot.absent:
            slot.used = bool(slot.use_flag.item() > 0)
            if not slot.used and not self.model.on_servers:
                return
            slot.used = True
        if slot.gradient is not slot.wire:
            slot.gradient.copy_(self._compression.decompress(slot.wire, slot.compression_context))
        if self._postscale != 1.0:
            slot.gradient.mul_(self._postscale)

    def find_sparse(self, slots: Sequence[Slot], absent: bool = False) -> None:
        """Learns whose gradients are sparse on any rank; collective.

        Args:
            absent: this rank has joined and has no gradients.
        """
        found = [i for i, slot in enumerate(slots) if not absent and _has_sparse_gradient(slot)]
        for i in registration.union(self._host, found):
            slots[i].sparse = True

    def finish_sparse(self, slots: Sequence[Slot]) -> None:
        """Exchanges the sparse gradients among ``slots``; collective where any exist."""
        for slot in slots:
            if slot.sparse:
                slot.used = sparse.exchange(
                    slot.parameter, self._prescale * self._postscale, self._process_set
                )
                slot.finished = True


def _has_sparse_gradient(slot: Slot) -> bool:
    gradient = slot.parameter.grad
    return gradient is not None and gradient.is_sparse
