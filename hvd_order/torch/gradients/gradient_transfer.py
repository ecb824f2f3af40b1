"""Sends gradients and receives their sums.

The stages of a gradient: prescale, compress, sum over the ranks, decompress, postscale. A rank
without a gradient sends zeros and a use flag of 0 in its place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hvd_order._native import _torch as native
from hvd_order.base.errors import InvalidUsage
from hvd_order.engine import registration, timeline
from hvd_order.engine.model_channel import ModelChannel
from hvd_order.engine.process_sets import ProcessSet
from hvd_order.engine.tracing.passes import MomentKind
from hvd_order.torch.collectives.compression import Compressor
from hvd_order.torch.gradients import misuse, sparse
from hvd_order.torch.kernels import use_kernels
from hvd_order.torch.parameters.entry import ParameterEntry
from hvd_order.torch.parameters.read_guard import (
    Guard,
    InFlightGradient,
    arm_gradient,
    disarm_gradient,
)
from hvd_order.torch.sums.arrivals import ENDED, UNDER_WAY
from hvd_order.torch.sums.registered_model import RegisteredModel

__all__: list[str] = []


_MOST_EXACT = 32  # ranks up to which sums of use flags of 16 bits tell who has given up


def _given_up_flag(size: int) -> int:
    """The use flag of a rank that has given up; the sum over all ranks is below zero."""
    return -2 * size


class GradientTransfer:
    """Sends and receives the gradients of one optimizer.

    Attributes:
        postscale: factor for the sums.
        streams: where sums are unpacked and parameters updated.
        adds_squares: whether the squares of sums are added up while they are unpacked.
    """

    def __init__(
        self,
        channel: ModelChannel,
        model: RegisteredModel,
        compression: type[Compressor] | Compressor,
        prescale: float,
        postscale: float,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        """Starts without transfers.

        Args:
            channel: of the model.
            model: the registered model of the gradients.
            prescale: factor for each rank's gradient before the sum.
            postscale: factor for the sum.
            sparse_as_dense: exchange sparse gradients as dense ones.
            process_set: the process set of the engine.
        """
        self._model = model
        self._use = model.use
        self._channel = channel
        self._compression = compression
        self._prescale = prescale
        self.postscale = postscale
        self._sparse_as_dense = sparse_as_dense
        self._process_set = process_set
        self.streams = native.HomeStreams([])
        self.adds_squares = False
        self._given_up: set[ParameterEntry] = set()  # sent by this rank as given up, not yet summed

    def use_devices(self, devices: Iterable[torch.device]) -> None:
        """Sets the devices of the parameters; work on them begins with their current streams."""
        devices = list(devices)
        for device in devices:
            use_kernels(device.type)
        self.streams = native.HomeStreams(sorted(devices, key=str))

    # ---- out ----------------------------------------------------------------------------------

    def send(self, entry: ParameterEntry, guard: Guard, warm_up: bool) -> None:
        """Puts ``parameter.grad`` in its place and passes it to the engine.

        Args:
            guard: called to finish the gradient if it is read before it is complete.
            warm_up: the model is still in warm-up, so a parameter may turn out sparse.
        """
        entry.own = None
        # Before this function has the gradient.
        reach = native.gradient_reach(entry, entry.parameter)
        gradient = entry.parameter.grad
        assert gradient is not None
        if type(gradient) is InFlightGradient:
            raise InvalidUsage(
                f"parameter '{entry.name}' belongs to two distributed optimizers; drop the old one "
                "before backward()"
            )
        if gradient.requires_grad:
            misuse.refuse_graph(entry.name)
        if gradient.is_sparse:
            if not self._sparse_as_dense:
                self._use.check_may_be_sparse(entry.name)
                self._leave_to_sparse(entry, warm_up)
                return
            gradient, reach = gradient.to_dense(), native.GradientReach.ALONE
        if not entry.in_place and not self._model.put_in_place([entry]):
            misuse.refuse_converted(entry)
        in_place = gradient is entry.gradient
        if self._may_be_kept(entry, reach):
            entry.own = gradient
        if not in_place:
            self._model.leave_to_program(entry)
        entry.advance(native.GradientEvent.SEND)
        done = (
            not (in_place and entry.on_wire)
            and (entry.casts or entry.on_wire)
            and self._model.sender.send(entry, gradient)
        )
        if not done:
            misuse.check_gradient(entry, gradient)
            if not self._model.put_in_place([entry]):
                misuse.refuse_converted(entry)
            with torch.no_grad():
                self._put_on_wire(entry, gradient)
            self._model.sender.hand_over(entry)
        if entry.own is None:
            self.show_sum(entry, guard)

    def show_sum(self, entry: ParameterEntry, guard: Guard) -> None:
        """Makes the sum, which is on its way, the gradient that the program finds."""
        entry.own = None
        entry.parameter.grad = entry.gradient
        entry.lock_gradient()
        arm_gradient(entry.gradient, guard)

    def _may_be_kept(self, entry: ParameterEntry, reach: native.GradientReach) -> bool:
        """Whether the program may reach the gradient without the parameter.

        The end of the backward pass tells where autograd itself may share the memory of its first
        gradient.

        Raises:
            InvalidUsage: the program has the gradient, and no rank will have its sum to put there.
        """
        if reach == native.GradientReach.HELD:
            self._use.check_may_keep(entry.name)
            return True
        if not self._use.is_readable:
            return False
        is_made_now = entry.fresh and self._model.sender.in_backward
        return reach == native.GradientReach.SHARED and not is_made_now

    def _put_on_wire(self, entry: ParameterEntry, gradient: torch.Tensor) -> None:
        if entry.on_wire:
            if gradient is not entry.gradient:
                torch.mul(gradient, self._prescale, out=entry.wire)
            elif self._prescale != 1.0:
                gradient.mul_(self._prescale)
        else:
            if gradient is not entry.gradient:
                entry.gradient.copy_(gradient)
            if self._prescale != 1.0:
                entry.gradient.mul_(self._prescale)
            travelling, entry.compression_context = self._compression.compress(entry.gradient)
            entry.wire.copy_(travelling)

    def _leave_to_sparse(self, entry: ParameterEntry, warm_up: bool) -> None:
        if not entry.sparse and not warm_up:
            raise InvalidUsage(
                f"the gradient of '{entry.name}' became sparse after the first two steps; pass "
                "sparse_as_dense=True to DistributedOptimizer"
            )
        if entry.placed:
            self.send_absent(entry)  # its place in the buffers must not delay its neighbours
        else:
            entry.advance(native.GradientEvent.SEND)

    def send_absent(self, entry: ParameterEntry, given_up: bool = False) -> None:
        """Informs the other ranks that this rank has no gradient for the parameter.

        Args:
            given_up: this rank has given up the step, as all ranks must.
        """
        taken_back = entry.sent  # it is locked, and ends as those of this step that were sent
        entry.absent = True
        entry.advance(native.GradientEvent.SEND)
        if not entry.placed:
            return
        if not taken_back:
            self._model.leave_to_program(entry)
        with torch.no_grad():
            entry.wire.zero_()
            # Below zero, whatever the other ranks add.
            entry.use_flag.fill_(_given_up_flag(self._channel.host.size) if given_up else 0)
        if given_up:
            self._given_up.add(entry)
        self._model.gradients.mark_ready(entry)

    # ---- in -----------------------------------------------------------------------------------

    def finish(
        self,
        entries: Iterable[ParameterEntry],
        stay_armed: bool = False,
        given_up: bool = False,
    ) -> None:
        """Waits for the sums and puts them into ``.grad``. Raises the engine's failure.

        Args:
            stay_armed: uses of complete gradients still call the guard.
            given_up: nobody will use the sums.

        Raises:
            InvalidUsage: another rank has given up the step; on every rank that has not.

        On devices the home streams wait and work; the host goes on.
        """
        arriving = self._model.arriving
        stages = arriving.stages()
        arrived: list[ParameterEntry] = []
        absent = []
        # Readers on other threads find each gradient in flight until it is complete.
        with (
            torch.no_grad(),
            torch._C.DisableTorchFunctionSubclass(),
            native.OnHomeStreams(self.streams),
        ):
            for entry in entries:
                if entry.summed or not entry.sent:
                    continue
                if entry.placed and stages[entry.tensor] != ENDED:
                    if stages[entry.tensor] == UNDER_WAY:  # the host would wait; work on
                        self._complete(arrived, stay_armed, given_up)
                        arrived.clear()
                    with timeline.span("wait", entry.name, **arriving.place_of(entry)):
                        arriving.wait(entry)
                    stages = arriving.stages()  # neighbours in its slice have come, too
                if entry.sparse:
                    entry.advance(native.GradientEvent.SUM)
                elif entry.absent:
                    absent.append(entry)
                else:
                    arrived.append(entry)
            if absent:
                for entry, used in zip(absent, self._model.used(absent), strict=True):
                    entry.used = used
                    arrived.append(entry)
            self._complete(arrived, stay_armed, given_up)

    def places_of(self, entries: Iterable[ParameterEntry]) -> dict[str, Any]:
        """The model and its parameters among ``entries``, by number, for the timeline."""
        return {"model": self._model.number, "parameters": [entry.tensor for entry in entries]}

    def in_profile(
        self, entries: Sequence[ParameterEntry]
    ) -> contextlib.AbstractContextManager[Any]:
        """Waits for the sums of ``entries``, and returns the range of their updates.

        For profilers, which see nothing of a clean room. Without one it does nothing.
        """
        if not entries or not timeline.profiler_runs():
            return contextlib.nullcontext()
        arriving = self._model.arriving
        for entry in entries:
            on_its_way = entry.placed and entry.sent and not entry.summed
            if on_its_way and arriving.stages()[entry.tensor] == UNDER_WAY:
                with timeline.span("wait", entry.name, **arriving.place_of(entry)):
                    arriving.wait(entry)
        return timeline.profiler_range("update")

    def note_moment(self, kind: MomentKind, read: Sequence[ParameterEntry] = ()) -> None:
        """Tells the timeline what bounds a forward or backward pass."""
        timeline.moment(kind, self._model.number, lambda: [entry.tensor for entry in read])

    def arrived(self) -> Callable[[ParameterEntry], bool]:
        """A test whether a gradient can be finished now without a wait of host or device."""
        stages = self._model.arriving.stages()
        return lambda entry: entry.summed or stages[entry.tensor] == ENDED

    def can_be_taken(self) -> Callable[[ParameterEntry], bool]:
        """A test whether a gradient can be finished now without a wait of the host."""
        taken = self._model.arriving.can_be_taken()
        return lambda entry: entry.summed or taken(entry)

    def _complete(
        self, entries: Sequence[ParameterEntry], stay_armed: bool, given_up: bool
    ) -> None:
        """Puts sums that have arrived into ``.grad``."""
        if self._use.returns_sums:
            if given_up:
                self._check_all_gave_up(entries)
            else:
                self.check_not_given_up(entries)
        if self._use.are_gradients(entries):
            self._make_gradients(entries, stay_armed)
        native.advance(entries, native.GradientEvent.SUM)

    def _make_gradients(self, entries: Sequence[ParameterEntry], stay_armed: bool) -> None:
        native.unlock_gradients(entries)
        try:
            apart = [entry for entry in entries if not entry.on_wire and entry.used]
            self._unpack([entry for entry in apart if entry.casts])
            for entry in apart:
                if not entry.casts:
                    entry.gradient.copy_(
                        self._compression.decompress(entry.wire, entry.compression_context)
                    )
            if self.postscale != 1.0:
                for entry in entries:
                    if entry.used and not entry.casts:
                        entry.gradient.mul_(self.postscale)
            for entry in entries:
                if entry.changes:
                    entry.make_changes()
                if entry.own is not None and entry.own is not entry.gradient:
                    entry.own.copy_(entry.gradient)
        finally:
            if not stay_armed:
                for entry in entries:
                    disarm_gradient(entry.gradient)

    def check_not_given_up(self, entries: Sequence[ParameterEntry]) -> None:
        """Raises InvalidUsage if another rank has given up the step, before its sums are used.

        On devices, whose sums would have to be waited for, that rank finds it.
        """
        lacking = native.find_given_up(entries)
        if lacking >= 0:
            rank = self._channel.host.job.rank
            self._refuse(misuse.given_up_elsewhere(entries[lacking].name, rank))

    def _check_all_gave_up(self, entries: Sequence[ParameterEntry]) -> None:
        """Raises InvalidUsage if another rank goes on with the step that this one has given up."""
        size = self._channel.host.size
        given_up = [entry for entry in entries if entry in self._given_up and entry.placed]
        self._given_up.difference_update(entries)
        if size > _MOST_EXACT and any(entry.use_flag.itemsize < 4 for entry in given_up):
            return  # sums of such flags are rounded
        own = float(_given_up_flag(size))
        flags = native.read_use_flags([entry.use_flag for entry in given_up])
        for entry, flag in zip(given_up, flags, strict=True):
            is_sum = self._use.is_readable or flag != own  # else nothing but what this rank put in
            if is_sum and flag > size * own - own / 2:
                rank = self._channel.host.job.rank
                self._refuse(misuse.given_up_here(entry.name, rank))

    def _refuse(self, error: InvalidUsage) -> None:
        self._channel.host.engine.fail(str(error))  # the other ranks learn it as well
        raise error

    def _unpack(self, entries: Sequence[ParameterEntry]) -> None:
        if not entries:
            return
        squares = native.unpack(
            [entry.wire for entry in entries],
            [entry.gradient for entry in entries],
            self.postscale,
            self.adds_squares,
        )
        for entry, of_it in zip(entries, squares, strict=True):
            entry.squares = of_it

    def find_sparse(self, entries: Sequence[ParameterEntry], absent: bool = False) -> None:
        """Finds the parameters whose gradients are sparse on any rank; collective.

        Args:
            absent: this rank has joined and has no gradients.
        """
        found = [i for i, entry in enumerate(entries) if not absent and _has_sparse_gradient(entry)]
        for i in registration.union(self._channel, "sparse gradients", found):
            entries[i].sparse = True

    def finish_sparse(self, entries: Sequence[ParameterEntry]) -> None:
        """Exchanges the sparse gradients among ``entries``; collective if any exist."""
        for entry in entries:
            if entry.sparse:
                entry.used = sparse.exchange(
                    entry.parameter,
                    self._prescale * self.postscale,
                    self._process_set,
                    f"optimizer {self._channel.key}.{entry.name}",
                )
                entry.advance(native.GradientEvent.SUM)


def _has_sparse_gradient(entry: ParameterEntry) -> bool:
    gradient = entry.parameter.grad
    return gradient is not None and gradient.is_sparse
