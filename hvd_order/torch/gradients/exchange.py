"""One model's gradients through a step: ready, sent, summed, applied.

docs/architecture.md draws the phases of a gradient.

``step()`` normally applies nothing. It records the hyper-parameters, arms every parameter with
the read guard and returns. The first reader of a parameter waits for its gradient; the user's own
optimizer then applies all gradients that have arrived in one call. A reader of a gradient before
``step()`` (clipping, AMP's unscale) waits for all gradients instead, and ``step()`` then updates
all parameters at once.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from hvd_order._native import _torch as native
from hvd_order.base.account.step_stats import StepStats
from hvd_order.base.errors import InvalidUsage, StaleRead
from hvd_order.engine import live_exchanges, registration, timeline
from hvd_order.engine.engine_host import EngineHost
from hvd_order.engine.model_channel import ModelChannel
from hvd_order.engine.requests.step_log import StepLogs
from hvd_order.torch.gradients import clipping, misuse
from hvd_order.torch.gradients.gradient_transfer import GradientTransfer
from hvd_order.torch.gradients.misuse import ZEROED_IN_FLIGHT
from hvd_order.torch.gradients.parts import make_parts
from hvd_order.torch.gradients.trained_parameters import TrainedParameters
from hvd_order.torch.parameters.entry import ParameterEntry
from hvd_order.torch.parameters.in_flight import Factor
from hvd_order.torch.parameters.read_guard import Guard, set_guard
from hvd_order.torch.rank_check.check import RankCheck
from hvd_order.torch.shards.model_shards import ModelShards
from hvd_order.torch.sums.coding import CodedGradient, Owed
from hvd_order.torch.sums.registered_model import RegisteredModel
from hvd_order.torch.sums.sum_use import SumUse
from hvd_order.torch.updates import clean_room, overlap
from hvd_order.torch.updates.overlap import Overlap, OverlapReport
from hvd_order.torch.updates.separability import Separability

__all__: list[str] = []


class GradientExchange:
    """Drives the engine for one optimizer.

    Thread safety: gradients of different devices arrive on different threads, and readers may run
    on any thread. One re-entrant lock covers every method, here and in the guard.

    Attributes:
        separability: whether updates may be deferred, and why not.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        verdict: Separability,
        entries: Sequence[ParameterEntry],
        frozen: Sequence[ParameterEntry],
        channel: ModelChannel,
        model: RegisteredModel,
        transfer: GradientTransfer,
        steps: StepLogs,
        passes: int,
    ) -> None:
        """Collective: registers the model on every rank.

        Args:
            verdict: whether updates may be deferred.
            entries: the trainable parameters.
            frozen: the other parameters, which may become trainable later.
            channel: of the model.
            steps: log of the exchange's actions, for joined ranks.
            passes: backward passes whose gradients add up before they are exchanged.
        """
        self._optimizer = weakref.ref(optimizer)
        self._use = model.use
        self._channel = channel
        self._host = channel.host
        self._model = model
        self._transfer = transfer
        self._sender = model.sender
        self.separability = verdict
        self._log = steps.open(channel.key, self)
        parts = make_parts(channel, model, transfer, self._log, verdict.separable, passes)
        self._lock = parts.lock
        self._table = parts.table
        self._warm_up = parts.warm_up
        self._norms = parts.norms
        self._gradients = parts.gradients
        self._updates = parts.updates
        self._guard = parts.guard
        self._account = parts.account
        self._recorder = parts.recorder
        self._overlap = Overlap(self._host.job.rank)
        self._trained_on: threading.Thread | None = None
        self._table.add_frozen(frozen)
        self._trained = TrainedParameters(self, parts, steps, self._host.job.rank)
        self._trained.add(entries)
        self._rank_check = RankCheck(channel, optimizer, self._table)
        self._owed: Owed = {}  # after the step before, if ranks talk after this one
        live_exchanges.add(self)

    # ---- parameters ---------------------------------------------------------------------------

    def check_usable(self, parameters: Any) -> None:
        """Raises InvalidUsage for parameters that cannot be added: they have no elements yet."""
        group = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        for number, parameter in enumerate(group):
            misuse.check_usable(f"new group, {number}", parameter, self._host.job.rank)

    def add_entries(self, entries: Sequence[ParameterEntry]) -> None:
        """Adds parameters that the optimizer received later. Collective."""
        with self._lock:
            self.flush()
            if not self._gradients.fresh:
                raise InvalidUsage(
                    "parameters can be added only between step() and the next backward(); "
                    "gradients are on their way"
                )
            self._trained.add_later([entry for entry in entries if entry.parameter.requires_grad])
            self._table.add_frozen(
                [entry for entry in entries if not entry.parameter.requires_grad]
            )

    def set_passes(self, passes: int) -> None:
        """Changes the number of backward passes from the next step on."""
        with self._lock:
            self._table.set_passes(passes)

    def entry_of(self, parameter: torch.Tensor) -> ParameterEntry | None:
        """The entry of a parameter, None if this exchange does not have it."""
        return self._table.of(parameter)

    # ---- gradients ----------------------------------------------------------------------------

    def on_gradient(self, entry: ParameterEntry) -> None:
        """Handles a backward pass's first gradient, or one that the sender does not handle."""
        # The program's modes must not see this work.
        with self._lock, native.CleanRoom():
            if self._gradients.were_cleared():
                self._gradients.give_up()
                self._begin_step()
            elif self._gradients.fresh or self._gradients.synchronized:
                self._begin_step()
            if entry.late:
                raise StaleRead(
                    f"the forward pass read parameter '{entry.name}' before the update of the last "
                    f"step had been applied (rank {self._host.job.rank}): a reader in C++ that "
                    "hvd_order could not see. Set HVD_ORDER_CROSS_ITERATION=0, or call "
                    "optimizer.flush() before that read."
                )
            if not self._sender.in_backward:
                self._sender.in_backward = True
                self._transfer.note_moment("backward")
                self._gradients.begin_pass()
                # No local name: an exception's traceback would keep it.
                torch.autograd.Variable._execution_engine.queue_callback(
                    _Pass(self._end_of_backward, self._gradients.break_pass)
                )
            if entry.sent:
                raise misuse.too_many_passes(entry.name, self._gradients.used_in_flight)
            entry.passes_to_go -= 1
            if entry.passes_to_go == 0:
                self._gradients.send(entry, self._guard)

    def _end_of_backward(self) -> None:
        self._sender.in_backward = False
        with self._lock, native.CleanRoom():
            self._recorder.end_backward()
            self._gradients.end_pass(self._guard)
        self._transfer.note_moment("backward_end")

    def _begin_step(self) -> None:
        """Handles the first gradient after step(): no earlier update may stay deferred."""
        self._trained.check_no_conflict()
        self._recorder.begin_step()
        self._warm_up.gradient_came(self._table.entries)
        for entry in self._updates.flush():
            entry.late = True
        self._rank_check.begin_step()
        self._owed = self._model.owed() if self._rank_check.talks_next else {}
        if self._gradients.synchronized:  # and no step() followed: the gradients were given up
            self._gradients.reset()
        unfrozen = self._table.take_unfrozen()
        if unfrozen or not self._model.put_in_place(self._table.entries):
            self._trained.add_later(unfrozen)
        self._gradients.begin()

    # ---- synchronize, step, flush -------------------------------------------------------------

    def synchronize(self) -> None:
        """Finishes all gradients of this step; without any, applies deferred updates."""
        with self._lock:
            if self._gradients.fresh and not self._gradients.set_by_hand():
                self.flush()
            elif not self._gradients.synchronized:
                if self._gradients.fresh:
                    self._begin_step()
                self._use.synchronize(self._gradients, self._guard)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Finishes the gradients and clips them by the norm of all."""
        with self._lock:
            in_flight = self._clip_in_flight(max_norm)
            if in_flight is not None:
                return in_flight
            self._use.check_may_read(self._gradients.fresh)
            # Whoever reads a gradient, to change it, finishes it.
            untouched = {entry for entry in self._table.entries if not entry.summed}
            self._transfer.adds_squares = True
            try:
                self.synchronize()
            finally:
                self._transfer.adds_squares = False
            with torch.no_grad():
                return clipping.clip_grad_norm_(self._table.entries, untouched, max_norm)

    def _clip_in_flight(self, max_norm: float) -> torch.Tensor | None:
        """Clips without waiting for the sums; None: their norms are not known early."""
        entries = self._table.entries
        if any(entry.parameter.grad is not entry.gradient for entry in entries):
            return None
        gradients = [entry.gradient for entry in entries]
        norms = self._guard.norms(gradients, 2.0)
        if norms is None:
            return None
        with torch.no_grad():
            norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
            factor = Factor(clipping.coefficient(norm, max_norm))
            self._guard.change(gradients, factor)
        return norm

    def _finish_step(self) -> None:
        if self._gradients.fresh:
            self._begin_step()
        self._gradients.finish(self._guard)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Applies this step's update, at once or when the parameters are next read."""
        loss = None
        if closure is not None:
            if not self.separability.evaluates_closure_once:
                return self._step_with_closure(closure)
            # Without the lock: on devices, gradients arrive on autograd's threads.
            with torch.enable_grad():
                loss = closure()
        with self._lock:
            optimizer = self._optimizer()
            assert optimizer is not None
            self._transfer.streams.follow()
            self._use.check_step()
            if self._gradients.broken and self._gradients.were_cleared():
                self._gradients.give_up()  # and this rank has no gradients of the next one
            if self._gradients.fresh:  # no gradient here; other ranks may wait for zeros
                self._begin_step()
            self._recorder.call_step()
            self._gradients.check_hooks()
            self._norms.close()
            self._gradients.send_remaining(self._guard)
            with self._recorder.updating():
                has_run = self._use.update(
                    optimizer, self._model, self._gradients, self._transfer.streams
                )
            reason = self._why_at_once(optimizer, has_run)
            if reason is None and self._gradients.replaced():
                reason = overlap.GRADIENTS_REPLACED
            if reason is None:
                self._gradients.finish_sparse()
                at_once = self._updates.defer(optimizer, self._guard)
            else:
                if not self._gradients.synchronized:
                    self._gradients.finish(self._guard)
                self._gradients.disarm()
                with timeline.span("update", "update", self._places), self._recorder.updating():
                    self._use.step(optimizer)
                at_once = dict.fromkeys(self._table.entries, reason)
            self._use.end_step(self._table.entries)
            self._end_step(at_once)
        return loss

    def _why_at_once(self, optimizer: Optimizer, has_run: bool) -> str | None:
        """Why this ``step()`` makes the whole update at once; None: the update may wait for its
        readers.

        Args:
            has_run: the optimizer has run.
        """
        if not self.separability.separable:
            return self.separability.reason
        if not self._warm_up.order.complete:
            return overlap.LEARNING
        if not self._host.slice_settings.cross_iteration:
            return overlap.NO_GAIN
        if self._warm_up.read_elsewhere:
            return overlap.OTHER_THREAD
        if self._gradients.synchronized:
            why_whole = self._model.why_whole()
            if self._gradients.read_by_norm and why_whole is not None:
                return overlap.clipped(why_whole)
            why_no_maxima = self._model.why_no_maxima()
            if self._norms.asked_for_maxima and why_no_maxima is not None:
                return overlap.no_maxima(why_no_maxima)
            return overlap.GRADIENTS_READ
        # These attributes belong to this call and are gone after it.
        if not has_run and getattr(optimizer, "found_inf", None) is not None:
            return overlap.SCALED
        inside = clean_room.inside_of(self._trained.device_types)
        return None if inside is None else overlap.called_inside(inside)

    def _step_with_closure(self, closure: Callable[[], Any]) -> Any:
        """Steps with a closure, which may run many times, each with its own backward pass."""

        def synchronized_closure() -> Any:
            loss = closure()
            with self._lock:
                self._finish_step()
                self._gradients.disarm()
                if loss is not None:
                    self._log.note("loss")
                return registration.average_loss(self._channel, loss)

        self.flush()
        optimizer = self._optimizer()
        assert optimizer is not None
        loss = self._use.step(optimizer, synchronized_closure)
        with self._lock:
            self._end_step(dict.fromkeys(self._table.entries, overlap.CLOSURE))
        return loss

    def _places(self) -> dict[str, Any]:
        return self._transfer.places_of(self._table.entries)

    def _end_step(self, at_once: Mapping[ParameterEntry, str], joined: bool = False) -> None:
        self._trained_on = threading.current_thread()
        self._transfer.note_moment("deferred" if self._updates.waiting else "step")
        self._overlap.note(self._table.entries, at_once, self._warm_up.order.complete)
        self._gradients.end()
        # Must come first: parameters are watched afterwards, and this is not a reader to record.
        owed = self._rank_check.step_taken({} if joined else self._owed, absent=joined)
        if owed is not None and self._model.coding is not None and self._host.rank == 0:
            self._model.coding.log_losses(owed)
        if not self._warm_up.order.complete:
            self._guard.find_compiled_regions()
        self._warm_up.step_taken(self._table.entries, self._guard, self.flush)
        self._recorder.end_step()

    @property
    def overlap_report(self) -> OverlapReport:
        """Report of the updates that the last ``step()`` deferred."""
        return self._overlap.report

    def stats(self) -> StepStats:
        """Where the time of the last steps went."""
        return self._account.stats

    def compression_report(self) -> list[CodedGradient]:
        """What travels in fewer bits, and what that does; between ``step()`` and ``backward()``."""
        with self._lock:
            self.flush()
            return self._model.compression_report()

    def flush(self) -> None:
        """Applies every deferred update."""
        with self._lock:
            self._warm_up.watch_again(self._updates.flush(), self._guard)

    def fetch_state(self) -> None:
        """Applies every deferred update, and fetches the optimizer's state from servers that keep
        it.
        """
        with self._lock:
            self.flush()
            self._use.fetch()

    @property
    def shards(self) -> ModelShards | None:
        """The shards, whose ranks have the optimizer's state; None: each rank has all of it.

        Applies every deferred update.
        """
        self.flush()
        return self._use.shards

    @property
    def use(self) -> SumUse:
        """What the sums of gradients are used for."""
        return self._use

    # ---- join ---------------------------------------------------------------------------------

    def prepare_to_join(self) -> None:
        """Finishes this rank's step; the other ranks have its gradients, or will get zeros."""
        self._use.check_may_join()
        with self._lock:
            self.flush()
            if self._gradients.fresh or self._gradients.synchronized:
                return
            if self._gradients.announced:
                self._gradients.mark_remaining_absent()
            else:  # passes whose sum has not been sent
                self._gradients.reset()

    def stand_in(self, event: str) -> None:
        """Repeats one event of another rank's step, with zeros and without an update.

        Args:
            event: "begin": gradients of a step are about to be sent. "give_up": the step ends
                without an update. "sparse": during the warm-up, the ranks exchange which gradients
                are sparse. "loss": a closure has computed the loss. "end": ``step()``.
        """
        with self._lock:
            if event in ("begin", "end") and not self._gradients.fresh:
                self._gradients.drop()
            if event == "begin":
                self._begin_step()
                self._gradients.clone_own_gradients()
                self._gradients.mark_remaining_absent()
            elif event == "give_up":
                self._gradients.give_up()
            elif event == "sparse":
                self._log.note(event)
                self._transfer.find_sparse(self._table.entries, absent=True)
            elif event == "loss":
                self._log.note(event)
                registration.average_loss(self._channel, None, absent=True)
            else:
                self._end_step({}, joined=True)

    def end_join(self) -> None:
        """All ranks have joined; gives up a step that has begun and not ended."""
        with self._lock:
            if not self._gradients.fresh and not self._gradients.synchronized:
                self._gradients.drop()

    # ---- the end, and a fork ------------------------------------------------------------------

    @property
    def host(self) -> EngineHost:
        """The host of the engine that carries these gradients."""
        return self._host

    @property
    def trained_on(self) -> threading.Thread | None:
        """The thread that took the last step; None: there was none."""
        return self._trained_on

    def end(self) -> None:
        """Applies deferred updates and leaves ordinary parameters; no step will follow."""
        with self._lock:
            self.flush()
            self._warm_up.end(self._table.entries)
            self._account.end()

    def hold(self) -> None:
        """Blocks other threads from the exchange, once they have left it."""
        self._lock.acquire()

    def release(self) -> None:
        """Lets other threads enter again."""
        self._lock.release()

    def release_in_child(self, guard: Guard) -> Optimizer | None:
        """In a forked child: releases the parameters; reads of unfinished tensors go to `guard`.

        Returns:
            The optimizer, if it still exists.
        """
        self._trained.remove_hooks()
        self._norms.close()
        self._warm_up.end(self._table.entries)
        for entry in self._table.entries:
            set_guard(entry.parameter, guard)
            set_guard(entry.gradient, guard)
        return self._optimizer()

    def entry_name(self, tensor: torch.Tensor) -> str:
        """The name of the parameter that `tensor` is, or whose gradient it is."""
        return next(
            entry.name
            for entry in self._table.entries
            if tensor is entry.parameter or tensor is entry.gradient
        )

    # ---- zero_grad ----------------------------------------------------------------------------

    def before_zero_grad(self, set_to_none: bool) -> None:
        """Prepares for ``zero_grad``.

        Raises:
            AssertionError: gradients of this step are in flight, and no other optimizer has
                stepped since they came. If one has, the gradients were a by-product of its loss,
                and are dropped.
        """
        with self._lock:
            if not self._gradients.fresh:
                self._end_unused()
            self._gradients.cleared = set_to_none
            self._recorder.was_cleared()

    def _end_unused(self) -> None:
        if self._gradients.synchronized or not self._gradients.announced:
            self._gradients.reset()
        elif self._gradients.used_in_flight:  # as after a read: a step without an update
            self._gradients.drop()
        elif self._gradients.have_no_use():
            self._gradients.give_up()
        else:
            raise AssertionError(ZEROED_IN_FLIGHT)

    @property
    def has_deferred_updates(self) -> bool:
        """Whether updates of the last ``step()`` still wait for readers."""
        with self._lock:  # a read on another thread may be applying the last of them
            return self._updates.waiting

    def clear(self, parameter: torch.Tensor, set_to_none: bool) -> bool:
        """Zeroes ``parameter.grad`` for its owner, but keeps gradients that are still to be
        applied.

        Returns:
            Whether that was necessary; if not, the ordinary way works.
        """
        entry = self._table.of(parameter)
        if entry is None:
            return False
        with self._lock:  # a read on another thread may be updating the parameter
            if not entry.update_pending:
                return False
            if self._updates.clear(entry, set_to_none):
                return True
            self._warm_up.watch_again([entry], self._guard)  # updated, but not read
            return False


class _Pass:
    """A backward pass, as autograd's engine has it: called at its end, dropped without a call if it
    ends by an exception.
    """

    __slots__ = ("_broken", "_ended")

    def __init__(self, ended: Callable[[], None], broken: Callable[[], None]) -> None:
        self._ended = ended
        self._broken: Callable[[], None] | None = broken

    def __call__(self) -> None:
        self._broken = None
        self._ended()

    def __del__(self) -> None:
        if self._broken is not None:
            self._broken()
