"""One model's gradients through a step: ready, sent, summed, applied.

The life of a parameter in step t::

    hook fires --> sent --> (engine) --> finished --> step t's update applied --> read by step t+1
                                          |                 |
                                  .grad may be read   the parameter may be read

``step()`` normally applies nothing: it remembers the hyper-parameters, arms every parameter with
the read guard and returns; the first reader of a parameter waits for it, and everything that has
arrived by then is updated in one go by the user's own optimizer. Whoever reads a gradient before
``step()`` (clipping, AMP's unscale) waits for all gradients instead, and ``step()`` then updates
at once.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from hvd_order.errors import InvalidUsage, StaleRead
from hvd_order.torch import deferred_update, registration, timeline
from hvd_order.torch.compiled_regions import CompiledRegions
from hvd_order.torch.consumption import ReadOrder
from hvd_order.torch.engine_host import EngineHost
from hvd_order.torch.gradient_transfer import GradientTransfer
from hvd_order.torch.portion import Portion
from hvd_order.torch.read_guard import arm_parameter, disarm_gradient, disarm_parameter
from hvd_order.torch.slot import Slot
from hvd_order.torch.step_log import StepLogs
from hvd_order.torch.tuning import Tuning

__all__: list[str] = []

_TOO_MANY_PASSES = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). "
    "Increase backward_passes_per_step to accumulate gradients locally. "
    "(parameter '{name}')"
)
_ZEROED_IN_FLIGHT = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
    "optimizer.synchronize(). This is prohibited as it can cause a race condition."
)


class GradientExchange:
    """Drives the engine for one optimizer; is the read guard of its parameters and gradients.

    Thread safety: gradients of different devices arrive on different threads, and readers may run
    anywhere; one re-entrant lock covers every method.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        step: deferred_update.InnerStep,
        slots: Sequence[Slot],
        frozen: Sequence[Slot],
        host: EngineHost,
        transfer: GradientTransfer,
        steps: StepLogs,
        passes: int,
    ) -> None:
        """Collective: registers the model on every rank.

        Args:
            slots: the trainable parameters.
            frozen: the others, which may become trainable later.
            steps: where the exchange says what it does, for ranks that have joined.
            passes: backward passes whose gradients add up before they are exchanged.
        """
        self._optimizer = weakref.ref(optimizer)
        self._inner_step = step
        self.slots = list(slots)
        self._frozen = list(frozen)
        self._by_parameter = {id(slot.parameter): slot for slot in slots}
        self._host = host
        self._transfer = transfer
        self.passes = passes
        self._lock = threading.RLock()

        config = host.context.config
        self._cross_iteration = config.cross_iteration and deferred_update.is_separable(
            optimizer, step
        )
        self._order = ReadOrder()
        enter_region = weakref.WeakMethod(self._enter_region)
        self._regions = CompiledRegions(lambda parameters: _call(enter_region(), parameters))
        self._pending: list[Slot] = []  # in consumption order
        self._portion = Portion()
        # Held while updates are outstanding: dropping the optimizer must not lose them.
        self._updating: Optimizer | None = None
        self._hyper_parameters: deferred_update.HyperParameters = []
        self._fresh = True  # no gradient of the coming step has been sent
        self._sender = transfer.model.sender  # knows whether a backward pass runs
        self._first_sent: Slot | None = None  # of the gradients of this step
        self._begun_at = 0  # the host's count of steps then
        self.synchronized = False  # all gradients of this step are finished, step() is to come

        self._steps = steps
        self._log = steps.open(host.process_set, self)
        self._tuning: Tuning | None = None
        self._hooks: list[Any] = []
        weakref.finalize(self, _remove, self._hooks).atexit = False
        for slot in self.slots:
            slot.begin_step(passes)
            self._hook(slot)
        self._register(self.slots)

    # ---- registration -------------------------------------------------------------------------

    def _hook(self, slot: Slot) -> None:
        weak = weakref.ref(self)

        def extraordinary(_: torch.Tensor) -> None:
            exchange = weak()
            if exchange is not None:
                exchange._on_gradient(slot)

        hook = self._sender.hook(slot, guard=weak, otherwise=extraordinary)
        self._hooks.append(slot.parameter.register_post_accumulate_grad_hook(hook))

    def _register(self, order: Sequence[Slot]) -> None:
        dense = [slot for slot in order if not slot.sparse]
        for slot in order:
            slot.placed = not slot.sparse
        self._transfer.model.register(dense, observed=self._order.complete)

    def add_slots(self, slots: Sequence[Slot]) -> None:
        """Takes in parameters that the optimizer got later. Collective."""
        with self._lock:
            self.flush()
            if not self._fresh:
                raise InvalidUsage(
                    "parameters can be added only between step() and the next backward(); "
                    "gradients are on their way"
                )
            self._take_in([slot for slot in slots if slot.parameter.requires_grad])
            self._frozen += [slot for slot in slots if not slot.parameter.requires_grad]

    def _take_in(self, slots: Sequence[Slot]) -> None:
        self._steps.check_nobody_joined("parameters are added or unfrozen")
        for slot in slots:
            slot.begin_step(self.passes)
            self._by_parameter[id(slot.parameter)] = slot
            self._hook(slot)
        self.slots.extend(slots)
        self._order = ReadOrder()
        self._register(self.slots)

    def _take_in_unfrozen(self) -> None:
        """Parameters that were frozen when the optimizer was wrapped and are no more."""
        trainable = [slot for slot in self._frozen if slot.parameter.requires_grad]
        if trainable:
            self._frozen = [slot for slot in self._frozen if slot not in trainable]
            self._take_in(trainable)

    def set_passes(self, passes: int) -> None:
        """Changes the number of backward passes from the next step on."""
        with self._lock:
            self.passes = passes
            for slot in self.slots:
                if not slot.sent:
                    slot.passes_to_go = passes

    def slot_of(self, parameter: torch.Tensor) -> Slot | None:
        """The slot of a parameter, None if this exchange does not know it."""
        return self._by_parameter.get(id(parameter))

    # ---- gradients ----------------------------------------------------------------------------

    def _on_gradient(self, slot: Slot) -> None:
        """The first gradient of a backward pass, or one that the sender leaves to us."""
        with self._lock:
            if self._cleared_by_owner():
                self._give_up()
                self._begin_step()
            elif self._fresh or self.synchronized:
                self._begin_step()
            if slot.late:
                raise StaleRead(
                    f"the forward pass read parameter '{slot.name}' before the update of the last "
                    f"step had been applied (rank {self._host.context.rank}): a reader in C++ that "
                    "hvd_order could not see. Set HVD_ORDER_CROSS_ITERATION=0, or call "
                    "optimizer.flush() before that read."
                )
            if not self._sender.in_backward:
                self._sender.in_backward = True
                torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)
            if slot.sent:
                raise AssertionError(_TOO_MANY_PASSES.format(name=slot.name))
            slot.passes_to_go -= 1
            if slot.passes_to_go == 0:
                self._send(slot)

    def _end_of_backward(self) -> None:
        self._sender.in_backward = False

    def _begin_step(self) -> None:
        """The first gradient after step(): nothing of the last step may be outstanding."""
        if self._order.watching:
            self._order.close()
            for slot in self.slots:
                disarm_parameter(slot.parameter)
        late = self._pending
        self.flush()
        for slot in late:
            slot.late = True
        if self.synchronized:  # and no step() followed: the gradients were given up
            self._reset()
        self._take_in_unfrozen()
        self._begun_at = self._host.steps
        self._transfer.model.raise_use_flags()
        self._fresh = False
        self._log.note("begin")

    def _cleared_by_owner(self) -> bool:
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

    def _give_up(self) -> None:
        """Lets the gradients of a step that will not come arrive, and forgets them."""
        self._log.note("give_up")
        self._send_nothing()
        self._transfer.finish(self.slots)
        self._reset()

    def _send(self, slot: Slot) -> None:
        self._transfer.send(slot, self, learning=not self._order.complete)
        if self._first_sent is None and slot.parameter.grad is slot.gradient:
            self._first_sent = slot

    def _complete_backward(self) -> None:
        """Sends what no hook has sent: set by hand, left from an unfinished pass, or absent."""
        if self._fresh:
            self._begin_step()
        for slot in self.slots:
            if slot.sent:
                continue
            if slot.parameter.grad is not None:
                self._send(slot)
            else:
                self._transfer.send_absent(slot)

    def _send_nothing(self) -> None:
        """This rank has no more gradients for this step."""
        for slot in self.slots:
            if not slot.sent:
                self._transfer.send_absent(slot)

    def _finish_sparse(self) -> None:
        if not self._order.complete:
            self._log.note("sparse")
            self._transfer.find_sparse(self.slots)
        self._transfer.finish_sparse(self.slots)

    # ---- synchronize, step, flush -------------------------------------------------------------

    def synchronize(self) -> None:
        """Finishes all gradients of this step; without any, finishes outstanding updates."""
        with self._lock:
            if self._fresh and not self._set_by_hand():
                self.flush()
            elif not self.synchronized:
                self._finish_step()

    def _set_by_hand(self) -> bool:
        """Whether the program has put gradients where no backward pass did."""
        return any(
            slot.parameter.grad is not None and slot.parameter.grad is not slot.gradient
            for slot in self.slots
            if not slot.sparse and not slot.update_pending
        )

    def _finish_step(self) -> None:
        self._complete_backward()
        self._finish_sparse()
        self._transfer.finish(self.slots)
        for slot in self.slots:
            if slot.absent and slot.used and not slot.sparse:
                slot.parameter.grad = slot.gradient
        self.synchronized = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Applies this step's update, now or when the parameters are next read."""
        with self._lock:
            optimizer = self._optimizer()
            assert optimizer is not None
            if closure is not None:
                return self._step_with_closure(optimizer, closure)
            if self._fresh:  # nobody here had a gradient; the others may wait for ours
                self._begin_step()
            if self._may_defer(optimizer):
                self._complete_backward()
                self._defer(optimizer)
            else:
                if not self.synchronized:
                    self._finish_step()
                with timeline.span("update", "update"):
                    self._inner_step(optimizer)
            self._end_step()
            return None

    def _may_defer(self, optimizer: Optimizer) -> bool:
        return (
            self._cross_iteration
            and self._order.complete
            and not self.synchronized
            # A fused optimizer under GradScaler: these belong to this call and are gone after it.
            and getattr(optimizer, "found_inf", None) is None
        )

    def _defer(self, optimizer: Optimizer) -> None:
        self._hyper_parameters = deferred_update.snapshot(optimizer)
        self._updating = optimizer
        self._finish_sparse()
        self._pending = sorted(self.slots, key=lambda slot: slot.tensor)
        for slot in self.slots:
            slot.update_pending = True
        at_once = [
            slot
            for slot in self.slots
            if not (slot.deferrable and arm_parameter(slot.parameter, self))
        ]
        if at_once:
            self._apply(at_once)

    def _step_with_closure(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        """The closure may run many times, each with a backward of its own."""

        def synchronized_closure() -> Any:
            loss = closure()
            self._finish_step()
            if loss is not None:
                self._log.note("loss")
            return registration.average_loss(self._host, loss)

        self.flush()
        loss = self._inner_step(optimizer, synchronized_closure)
        self._end_step()
        return loss

    def _end_step(self) -> None:
        self._log.note("end")
        self._reset()
        self._fresh = True
        self._host.steps += 1
        if self._order.complete:
            self._tune()
        else:
            self._learn()

    def flush(self) -> None:
        """Finishes every outstanding update."""
        with self._lock:
            if self._pending:
                self._apply(self._pending)

    def _apply(self, slots: Iterable[Slot]) -> None:
        """Updates the parameters of ``slots`` with the hyper-parameters of their step."""
        optimizer = self._updating
        slots = list(slots)
        self._transfer.finish(slots)
        applied = set(slots)
        self._pending = [slot for slot in self._pending if slot not in applied]
        due: list[Slot] = []
        gradients_before: list[torch.Tensor | None] = []
        for slot in slots:
            slot.update_pending = False
            disarm_parameter(slot.parameter)
            if slot.used:
                due.append(slot)
                gradients_before.append(slot.parameter.grad)
                if not slot.sparse:
                    slot.parameter.grad = slot.gradient
        if due:
            assert optimizer is not None
            with timeline.span("update", "update", tensors=len(due)), self._portion.timed(due):
                deferred_update.run(
                    optimizer, self._inner_step, self._hyper_parameters,
                    [slot.parameter for slot in due],
                )  # fmt: skip
        for slot, before in zip(due, gradients_before, strict=True):
            # A gradient that only other ranks had stays, as all do until they are cleared.
            if not (slot.absent and not slot.cleared):
                slot.parameter.grad = before
        for slot in slots:
            slot.begin_step(self.passes)
        if not self._pending:
            self._updating = None

    def _reset(self) -> None:
        self.synchronized = False
        self._sender.in_backward = False
        self._first_sent = None
        for slot in self.slots:
            if not slot.update_pending:
                slot.begin_step(self.passes)

    def _learn(self) -> None:
        """Watches who reads what after the first step, and takes that as order after the second."""
        if self._order.complete:
            return
        self._regions.find(self.slots)
        if not self._order.started:
            self._order.start()
            for slot in self.slots:
                arm_parameter(slot.parameter, self)
            return
        seen = self._order.finish()
        for slot in self.slots:
            # A sparse gradient has no place of its own in which it could outlive zero_grad().
            slot.deferrable = slot in seen and not slot.sparse
        # What nobody was seen reading is updated in step(): it is needed first of all.
        unseen = [slot for slot in self.slots if slot not in seen]
        self._register(unseen + list(seen))
        # One engine has one credit: with several optimizers the first one's choice is for all.
        if self._transfer.model.alone and not self._host.tuned:
            self._host.tuned = True
            device = self.slots[0].parameter.device
            self._tuning = Tuning(self._host, self._transfer.model, device)

    def _tune(self) -> None:
        if self._tuning is None or self._tuning.done:
            return
        turn = self._tuning.measured()
        if turn is not None:
            self.flush()
            self._tuning.go_on(turn)

    # ---- join ---------------------------------------------------------------------------------

    def prepare_to_join(self) -> None:
        """Finishes what this rank has begun; the others have its gradients, or will get zeros."""
        with self._lock:
            self.flush()
            if not self._fresh and not self.synchronized:
                self._send_nothing()

    def stand_in(self, event: str) -> None:
        """Does what another rank has done, with zeros and without an update; notes one event.

        Args:
            event: "begin": the first gradient of a step has come. "give_up": the step ends without
                an update. "sparse": while the model is learnt, the ranks tell each other whose
                gradients are sparse. "loss": a closure has computed the loss. "end": ``step()``.
        """
        with self._lock:
            if event in ("begin", "end") and not self._fresh:
                self._transfer.finish(self.slots)
                self._reset()
            if event == "begin":
                self._begin_step()
                for slot in self.slots:  # the program's own gradients are not to be overwritten
                    if slot.parameter.grad is slot.gradient:
                        slot.parameter.grad = slot.gradient.clone()
                self._send_nothing()
            elif event == "give_up":
                self._give_up()
                self._fresh = True
            elif event == "sparse":
                self._log.note(event)
                self._transfer.find_sparse(self.slots, absent=True)
            elif event == "loss":
                self._log.note(event)
                registration.average_loss(self._host, None, absent=True)
            else:
                self._end_step()

    def end_join(self) -> None:
        """All ranks have joined; a step that was begun and not ended is given up."""
        with self._lock:
            if not self._fresh and not self.synchronized:
                self._transfer.finish(self.slots)
                self._reset()
                self._fresh = True

    # ---- zero_grad ----------------------------------------------------------------------------

    def before_zero_grad(self) -> None:
        """Makes way for ``zero_grad``.

        Raises:
            AssertionError: gradients of this step travel, and no other optimizer has stepped since
                they came: then they were a by-product of its loss, and are dropped.
        """
        with self._lock:
            if self._fresh:
                return
            if self.synchronized or not any(slot.sent for slot in self.slots):
                self._reset()
            elif self._host.steps != self._begun_at:
                self._give_up()
            else:
                raise AssertionError(_ZEROED_IN_FLIGHT)
            self._fresh = True

    def clear(self, parameter: torch.Tensor, set_to_none: bool) -> bool:
        """Zeroes ``parameter.grad`` for its owner, leaving alone what still has to be applied.

        Returns:
            Whether that was necessary; else the ordinary way is right.
        """
        slot = self.slot_of(parameter)
        if slot is None or not slot.update_pending:
            return False
        if slot.absent:
            # Whether there is a gradient to zero depends on the other ranks; none needs no answer.
            if not set_to_none:
                self._apply([slot])
                return False
            slot.cleared = True
        else:
            with torch._C.DisableTorchFunctionSubclass():  # the answer is known here
                if parameter.grad is not None:
                    parameter.grad = None if set_to_none else torch.zeros_like(slot.gradient)
        return True

    # ---- read guard ---------------------------------------------------------------------------

    def before_parameter_read(self, parameters: list[torch.Tensor]) -> None:
        """Guard: brings the parameters, and what else has arrived by then, up to date."""
        with self._lock:
            wanted = []
            for parameter in parameters:
                slot = self._by_parameter[id(parameter)]
                if slot.update_pending:
                    wanted.append(slot)
                else:
                    self._order.note(slot)
                    disarm_parameter(parameter)
            if wanted:
                arrived = self._transfer.arrived()
                while not all(map(arrived, wanted)):
                    portion = self._portion.of(filter(arrived, self._pending))
                    if not portion:
                        break
                    self._apply(portion)  # puts the wait to use
                    arrived = self._transfer.arrived()
                self._transfer.finish(wanted)
                # Some that are read next come along.
                self._apply(dict.fromkeys(
                    [slot for slot in wanted if slot.update_pending]
                    + self._portion.of(filter(arrived, self._pending))
                ))  # fmt: skip

    def before_grad_attribute(self, parameter: torch.Tensor) -> None:
        """Guard: ``.grad`` of a pending parameter is looked at or set."""
        with self._lock:
            slot = self.slot_of(parameter)
            # Whether it is None depends on the other ranks.
            if slot is not None and slot.update_pending and slot.absent and not slot.cleared:
                self._apply([slot])

    def before_gradient_read(self, gradients: list[torch.Tensor]) -> None:
        """Guard: completes the exchange of the gradients."""
        with self._lock:
            wanted = {id(gradient) for gradient in gradients}
            slots = [slot for slot in self.slots if id(slot.gradient) in wanted]
            outstanding = [slot for slot in slots if slot.update_pending]
            if outstanding:
                self._apply(outstanding)
            if self._sender.in_backward:
                self._check_all_sent(slots)
                self._transfer.finish(slots)
            elif not self._fresh and not self.synchronized:
                self._finish_step()
            for slot in slots:
                disarm_gradient(slot.gradient)

    def _check_all_sent(self, read: Sequence[Slot]) -> None:
        """Raises rather than wait for gradients that the waiting backward pass has yet to make."""
        if read and not all(slot.sent for slot in self.slots):
            raise InvalidUsage(
                f"the gradient of '{read[0].name}' was read in the middle of the backward pass, "
                "where it is still being summed over the ranks; read it after backward(), or use "
                "Tensor.register_hook, which sees this rank's own gradient"
            )

    def _enter_region(self, parameters: list[torch.Tensor]) -> None:
        """A compiled region that reads ``parameters`` is about to run."""
        armed = [p for p in parameters if self._is_armed(p)]
        if armed:
            self.before_parameter_read(armed)

    def _is_armed(self, parameter: torch.Tensor) -> bool:
        slot = self.slot_of(parameter)
        return slot is not None and (slot.update_pending or self._order.watching)


def _call(method: Callable[[list[torch.Tensor]], None] | None, values: list[torch.Tensor]) -> None:
    if method is not None:
        method(values)


def _remove(hooks: Sequence[Any]) -> None:
    for hook in hooks:
        hook.remove()
