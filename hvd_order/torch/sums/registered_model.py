"""One optimizer's model in the engine: its buffers, its slices, its plan."""

from __future__ import annotations

import contextlib
import logging
import math
import time
import weakref
from collections.abc import Iterable, Sequence

import torch

from hvd_order._native import _torch as native
from hvd_order.base.errors import HvdOrderError
from hvd_order.base.link.link_model import LinkModel
from hvd_order.base.link.slice_settings import SliceSettings
from hvd_order.engine import registration, static_plan, timeline
from hvd_order.engine.advised_settings import advised_settings
from hvd_order.engine.engine_host import EngineHost
from hvd_order.engine.half_forms import check_codes, why_no_halves
from hvd_order.engine.host_levels import use_host_levels
from hvd_order.engine.model_channel import ModelChannel
from hvd_order.torch.collectives.compression import CodedSums, Compressor
from hvd_order.torch.devices import synchronize
from hvd_order.torch.parameters.entry import ParameterEntry
from hvd_order.torch.parameters.read_guard import GUARD, InFlightGradient
from hvd_order.torch.sums.arrivals import Arrivals, Waits
from hvd_order.torch.sums.coding import CodedGradient, GradientCoding, Owed
from hvd_order.torch.sums.gradient_buffers import MOST_MAXIMA_BYTES, GradientBuffers
from hvd_order.torch.sums.norms import in_type
from hvd_order.torch.sums.sum_use import SumUse

__all__: list[str] = []

_log = logging.getLogger("hvd_order")
_ENQUEUED = native.Stage.ENQUEUED


class RegisteredModel:
    """The registration of one optimizer's gradients in the engine.

    Dropping it removes the model from the engine; nothing of the model may be in flight then.

    Attributes:
        use: what the sums are used for.
        sender: sends gradients that need no special treatment.
        entries: by TensorId.
        gradients: the sums.
        parameters: what follows them where sums travel in halves.
        arriving: what the update takes: the one or the other.
        read_by_norm: whether in the last step the program read the norms of gradients before
            ``step()``, and no elements.
        reads_maxima: whether the program has ever read an infinity norm there.
        coding: how gradients travel in fewer bits; None: they do not.
        waits: of the present step, for its account.
    """

    def __init__(
        self,
        channel: ModelChannel,
        use: SumUse,
        compression: type[Compressor] | Compressor,
        prescale: float,
    ) -> None:
        """Starts without a registration.

        Args:
            channel: of this model.
            prescale: factor for each gradient that the sender sends.
        """
        host = channel.host
        self.sender = native.GradientSender(
            host.engine, host.transport, host.copier, prescale,
            in_flight_class=InFlightGradient, guard_attribute=GUARD,
        )  # fmt: skip
        self.use = use
        self._channel = channel
        self._host = host
        self._compression = compression
        self._model = -1
        self._only_model = False
        self._forget: weakref.finalize[..., RegisteredModel] | None = None
        self._buffers: GradientBuffers
        self.entries: Sequence[ParameterEntry] = []
        self.gradients: Arrivals
        self.parameters: Arrivals
        self.arriving: Arrivals
        self.waits = Waits()
        self.read_by_norm = False
        self.reads_maxima = False
        self.coding = (
            GradientCoding(compression, host.size) if isinstance(compression, CodedSums) else None
        )
        self._split = self._encodes
        self._with_maxima = False  # where all-reduces are split, and maxima fit
        self._by_need = False  # halves do not wait for what norms need

    @property
    def number(self) -> int:
        """Number of the model in the engine; -1 before it is registered."""
        return self._model

    def register(self, entries: Sequence[ParameterEntry], observed: bool) -> None:
        """Lays out the gradients of ``entries`` in the given order, that of rank 0, on all ranks.

        Collective, in the engine's turn. Nothing may be in flight.

        Args:
            entries: in consumption order, as far as it is known.
            observed: the entries hold the times of a real step, from which a plan can be made.

        Raises:
            ModelMismatch: the ranks have different parameters.
            InvalidUsage: parameters that came later have no use here, or gradients cannot be
                encoded.
        """
        self.use.check_entries(entries, self.entries)
        self._end_registration()
        self._host.free_id(self._model)
        agreed = registration.agree(
            self._channel,
            [(s.name, tuple(s.parameter.shape), _kind(s.parameter)) for s in entries],
        )
        self.entries = [entries[i] for i in agreed.order]
        # Sums in halves cannot be completed, so at first there are maxima whatever is read.
        self._agree_on_maxima(self.reads_maxima or (self.use.in_halves and not observed))
        settings = self._host.slice_settings
        self._buffers = GradientBuffers(
            self.entries, self._compression, settings.slice_bytes, settings.small_front,
            sharded=self.use.in_halves, maxima_ranks=self._maxima_ranks,
        )  # fmt: skip
        self._prepare_codes()
        self.use.lay_out(self.entries, self._buffers.flat, self._buffers.layout, observed)
        if self._split and self._buffers.can_be_split:
            self._cut_buffers(split=True)
        self._model = self.sender.model = agreed.model
        self._only_model = agreed.only_model
        self._add_with_plan(observed)
        self.raise_use_flags()

    def _prepare_codes(self) -> None:
        """Raises InvalidUsage if sums are to be encoded and cannot."""
        if self.coding is None:
            return
        if self.entries:  # all gradients may be sparse
            check_codes(self._obstacle() or self.coding.why_impossible(self._buffers))
        use_host_levels(self._channel)
        self.coding.prepare(self.entries, speaks=self._host.rank == 0)

    def choose_coded(self, coding: GradientCoding, link: LinkModel) -> None:
        """Chooses the gradients that travel in fewer bits from rank 0's times of the last step.

        Collective, in the engine's turn. Nothing may be in flight.
        """
        if self._forget is not None:
            self._take_ready_times()
        mine = coding.choice(self.entries, self._buffers, link, both=not self.use.in_halves)
        coding.names = frozenset(self._channel.gather("what to encode", mine)[0])

    def _choose_without_trials(self) -> None:
        link = self._host.known_link
        if self.coding is not None and self.coding.chooses and link is not None:
            self.choose_coded(self.coding, link)
            self.coding.active = bool(self.coding.names)

    @property
    def _encodes(self) -> bool:
        return self.coding is not None and self.coding.active

    def compression_report(self) -> list[CodedGradient]:
        """What travels in fewer bits; nothing may be in flight."""
        return [] if self.coding is None else self.coding.report(self.entries, self._buffers)

    def owed(self) -> Owed:
        """What this rank owes to sums in codes; nothing may be in flight."""
        return {} if self.coding is None else self.coding.owed(self.entries, self._buffers)

    @property
    def wire_bytes(self) -> int:
        """Size of all gradients on the wire, with those in fewer bits that were chosen for it."""
        return self.size_bytes if self.coding is None else self.coding.wire_bytes(self.entries)

    @property
    def layout(self) -> native.SliceLayout:
        """The slices of the present registration."""
        return self._buffers.layout

    def slice_times(self) -> bytes:
        """When each slice was ready, issued and done; see `native.Engine.slice_times`."""
        return self._host.engine.slice_times(self._model)

    def retune(self, settings: SliceSettings, issue_order: Sequence[str] | None = None) -> None:
        """Cuts the same gradients into other slices. Collective, in the engine's turn. Nothing may
        be in flight.

        Args:
            issue_order: for ``planned`` agreement, all slices by name; None: from the last step.
        """
        self._end_registration()
        self._agree_on_maxima(self.reads_maxima)
        self._host.retune(settings, self._model)
        self.sender.copies_beside = settings.cross_iteration
        if self.coding is not None:
            self.coding.active = settings.coded or not self.coding.chooses
        self._recut(settings, settings.split, issue_order)

    def use_advised_settings(self, device: torch.device) -> None:
        """Takes the link model's settings for the next registration, unless another optimizer has
        tuned the engine; and chooses what travels in fewer bits, if the program leaves that open.
        Collective, in the engine's turn. Nothing may be in flight.

        Sharded models are not tried with other settings: each trial would move the state.
        """
        host = self._host
        if self._only_model and not host.tuning_begun:
            self._end_registration()
            host.tuning_begun = host.tuning_ended = True
            host.retune(
                advised_settings(self._channel, device, self.size_bytes, split=True), self._model
            )
        self._choose_without_trials()

    def split_if_of_use(self, deferrable: bool) -> None:
        """Splits the all-reduces of a model whose other settings are those of an earlier model.

        Gradients that the link would make the step wait for travel in fewer bits, if the program
        leaves the choice, without a trial. Collective, in the engine's turn. Nothing of this model
        may be in flight.

        Args:
            deferrable: updates may wait for their readers.
        """
        host = self._host
        self._choose_without_trials()
        settings = host.slice_settings
        wanted = (
            deferrable and settings.cross_iteration and bool(host.has_halves) and self.may_be_split
        )
        encodes = self._encodes and self._buffers.can_be_split
        if encodes or all(self._channel.gather("whether to split", wanted)):
            self._end_registration()
            self._agree_on_maxima(self.reads_maxima)
            self._recut(settings, split=True)

    def _recut(
        self, settings: SliceSettings, split: bool, issue_order: Sequence[str] | None = None
    ) -> None:
        self._split = split = split or (self._encodes and self._buffers.can_be_split)
        self._buffers.recut(
            settings.slice_bytes, settings.small_front, split, self._maxima_ranks, self._by_need
        )
        self._add_with_plan(observed=True, issue_order=issue_order)

    def _agree_on_maxima(self, wanted: bool) -> None:
        """Decides whether infinity norms arrive with the squares: if all ranks want them; and
        whether halves go by need: if no rank reads norms.

        Collective; so no rank adds the model's id before all have removed it.
        """
        of_ranks = self._channel.gather("maxima", (wanted, self.read_by_norm))
        self._with_maxima = all(maxima for maxima, _ in of_ranks)
        self._by_need = self.coding is not None and not any(read for _, read in of_ranks)

    @property
    def maxima_fit(self) -> bool:
        """Whether the maxima of this model on all ranks are few enough."""
        needed = self._host.size * len(self.entries) * torch.float64.itemsize
        return needed <= MOST_MAXIMA_BYTES

    @property
    def _maxima_ranks(self) -> int:
        return self._host.size if self._with_maxima and self.maxima_fit else 0

    @property
    def lacks_maxima(self) -> bool:
        """Whether a new registration could make infinity norms known early."""
        return (
            self.reads_maxima and self.is_split and not self.has_norms(math.inf) and self.maxima_fit
        )

    def has_norms(self, order: float) -> bool:
        """Whether norms of this order, 2 or infinity, are known early."""
        return self._buffers.has_maxima if order == math.inf else self.is_split

    def why_no_maxima(self) -> str | None:
        """Why infinity norms are not known early although all-reduces are split, or would not be
        if they were; None otherwise.
        """
        if self._buffers.has_maxima:
            return None
        if not self.maxima_fit:
            return (
                f"with {len(self.entries)} gradients and {self._host.size} ranks its parts take "
                f"more than {MOST_MAXIMA_BYTES >> 20} MiB"
            )
        if self.is_split:
            return "none had been read on every rank when slices were last cut"
        return None

    @property
    def only_model(self) -> bool:
        """Whether no rank had another model when this one was registered.

        The number of models now must not decide anything, because ranks drop models at different
        times.
        """
        return self._only_model

    @property
    def size_bytes(self) -> int:
        """Size of all gradients as they are sent."""
        return sum(flat.nbytes for flat in self._buffers.flat)

    @property
    def may_be_split(self) -> bool:
        """Whether split all-reduces are possible, and of use or asked for (HVD_ORDER_DEBUG)."""
        return (
            self._encodes or "split" in self._host.job.config.debug or self.read_by_norm
        ) and self._obstacle() is None

    def _obstacle(self) -> str | None:
        obstacle = why_no_halves(self._host)
        if obstacle is not None:
            return obstacle
        if not self._buffers.can_be_split:
            return "gradients are on several devices, or not floating-point numbers"
        if not all(entry.casts or entry.on_wire for entry in self.entries):
            return "the compression is not a cast to 16 bits"
        return None

    @property
    def is_split(self) -> bool:
        """Whether all-reduces are split, so that norms are known early."""
        return self._buffers.squares is not None

    def why_whole(self) -> str | None:
        """Why all-reduces are not split; None if they are."""
        if self.is_split:
            return None
        return self._obstacle() or "trials have not begun, or found it slower"

    def _add_with_plan(self, observed: bool, issue_order: Sequence[str] | None = None) -> None:
        if self._host.agreement != "planned":
            self._add([])
            return
        layout = self._buffers.layout
        if self.use.in_halves:  # what all wait for first, then what is needed first
            self._add(static_plan.arrival_plan(layout))
            return
        plan = None if issue_order is None else static_plan.by_name(layout, issue_order)
        if issue_order is not None and plan is None and self._host.rank == 0:
            _log.warning(
                "the plan orders %d slices, the model has %d others (parameters of several types, "
                "or read where Python cannot see it): the order of the last step is taken",
                len(issue_order), len(layout.slices),
            )  # fmt: skip
        if plan is None:
            plan = self._observed_plan() if observed else static_plan.arrival_plan(layout)
        self._add(plan)

    def _add(self, plan: list[int]) -> None:
        buffers, layout = self._buffers.registered, self._buffers.layout
        groups = self.use.update_groups(self.entries)
        self._host.add_model(self._model, layout, buffers, plan, groups)
        if self.coding is not None:
            self.coding.set_up(self.entries, self._buffers, self._host.transport, self._model)
        self.gradients = self.arriving = Arrivals(self._host, self._model, 0, self.waits)
        if self.use.in_halves:
            self.parameters = Arrivals(self._host, self._model, layout.parameter_of(0), self.waits)
        self.use.registered(self._model, self.entries)
        self._forget = weakref.finalize(
            self, _forget, self._host, self._model, self._buffers.devices
        )
        self._forget.atexit = False

    def _end_registration(self) -> None:
        """Ends the registration; state that others have returns to the optimizer. Collective in
        that case.
        """
        if self._forget is not None:
            self.use.before_end()
            self._wait_for_devices()
            self._take_ready_times()
        self._remove()

    def begin_step(self) -> None:
        """Prepares for the first gradient of a step."""
        self.raise_use_flags()
        self.use.begin_step(self.entries)
        self.arriving = self.gradients

    def begin_sending(self) -> None:
        """Prepares for the first gradient of a step that is sent, on this rank and all others."""
        if self.is_split:
            self._wait_for_squares()  # of the step before: they may arrive after the last sum
            if self._buffers.has_maxima:
                self._buffers.clear_maxima()
                for device in self._buffers.devices:
                    self._host.transport.order_transfers_behind(device)
            self._host.engine.tensor_ready(self._model, self._buffers.layout.squares_tensor)

    def _wait_for_squares(self) -> None:
        squares = self._buffers.layout.squares_tensor
        begin = time.monotonic_ns()
        self._host.engine.wait(self._model, squares)
        self.waits.ended(begin, squares)

    def norms_of_sums(self, order: float, factor: float, dtype: torch.dtype) -> torch.Tensor:
        """Waits until the first half of each sum of this step is done.

        Args:
            order: 2 or infinity; one that `has_norms`.
            factor: of all sums.
            dtype: of the result.

        Returns:
            The norms of the sums, by TensorId.
        """
        self._host.copier.release()
        with timeline.span("wait", "norms"):
            self._wait_for_squares()
        with torch.no_grad():
            if order == math.inf:
                return self._buffers.infinity_norms(factor, dtype)
            return in_type(self._buffers.two_norms(factor), dtype)

    def _remove(self) -> None:
        if self._forget is not None:
            self._forget.detach()
            self._forget = None
            self._host.remove_model(self._model)

    def _take_ready_times(self) -> None:
        """Keeps when the last gradients came, for the plan of the next registration."""
        times = self._host.engine.ready_times(self._model)
        for entry, ready_s in zip(self.entries, times, strict=False):  # also of the squares
            if ready_s > 0:  # a gradient has come since the registration
                entry.ready_s = ready_s

    def _wait_for_devices(self) -> None:
        """Waits until no device works on the buffers."""
        for entry in self.entries:
            self.arriving.wait_on_host(entry)
        if self.is_split:
            self._wait_for_squares()
        for device in self._buffers.devices:
            synchronize(device)

    def _observed_plan(self) -> list[int]:
        """The best order in which the last step could have been sent, from rank 0's times."""
        link = self._host.known_link or self._pace()
        plan = static_plan.replay(
            self._buffers.layout,
            [entry.ready_s for entry in self.entries],
            link,
            self._host.slice_settings,
        )
        mine_and_theirs: list[list[int]] = self._channel.gather("an observed plan", plan)
        return mine_and_theirs[0]

    def _pace(self) -> LinkModel:
        """Seconds per byte, measured with whole sums of the gradients themselves, until the
        transport is measured.
        """
        split = self.is_split
        if split:  # squares would follow, from nobody
            self._cut_buffers(split=False)
        self._add(static_plan.arrival_plan(self._buffers.layout))
        pace = static_plan.seconds_per_byte(
            self._buffers.layout,
            ready=lambda tensor: self.gradients.mark_ready(self.entries[tensor]),
            wait=lambda tensor: self.gradients.wait_on_host(self.entries[tensor]),
        )
        self._remove()
        if split:
            self._cut_buffers(split=True)
        return LinkModel(0.0, 0.0, pace)

    def _cut_buffers(self, split: bool) -> None:
        settings = self._host.slice_settings
        self._buffers.recut(
            settings.slice_bytes, settings.small_front, split, self._maxima_ranks, self._by_need
        )

    def raise_use_flags(self) -> None:
        """Sets the use flag of every gradient to 1."""
        self._buffers.raise_use_flags()
        for device in self._buffers.devices:  # the gradients may come on other streams
            self._host.transport.order_transfers_behind(device)

    def put_in_place(self, entries: Sequence[ParameterEntry]) -> bool:
        """Restores places from which the program has moved gradients (``model.float()``).

        Returns:
            Whether that is enough; if not, gradients have another shape, dtype or device than their
            places, and the model must be registered anew.
        """
        placed = [entry for entry in entries if entry.placed]
        found = native.places(placed, [entry.parameter for entry in placed])
        if found == native.Places.LEFT:
            for entry in placed:
                if not entry.in_place:
                    self._buffers.put_in_place(entry)
        return found != native.Places.UNFIT

    def leave_to_program(self, entry: ParameterEntry) -> None:
        """Leaves the last gradient to the program if that has taken it: another one comes."""
        self._buffers.leave_to_program(entry)

    def find_used(self) -> list[ParameterEntry]:
        """Finds the parameters that only other ranks have used, once the first halves are done."""
        absent = [entry for entry in self.entries if entry.absent]
        if absent:
            self._wait_for_squares()
            used = self._buffers.used()
            for entry in absent:
                entry.used = used[entry.tensor]
        return [entry for entry in absent if entry.used]

    def used(self, entries: Sequence[ParameterEntry]) -> list[bool]:
        """Waits for the sums of the entries; returns for each whether any rank had a gradient.

        Whoever answers with parameters tells nothing of that.
        """
        for entry in entries:
            self.arriving.wait_on_host(entry)
        if not self.use.returns_sums:
            return [True] * len(entries)
        return [value > 0 for value in native.read_use_flags([e.use_flag for e in entries])]


def _kind(parameter: torch.Tensor) -> str:
    dtype = native.gradient_dtype(parameter)
    if dtype == parameter.dtype:
        return str(dtype)
    return f"{parameter.dtype} with gradients of {dtype}"


def _forget(host: EngineHost, model: int, devices: Iterable[torch.device]) -> None:
    with contextlib.suppress(HvdOrderError):  # the engine has failed or has been shut down
        # Devices may still be at work on the last step. Gradients that no update followed, and
        # that other ranks may never produce, are not waited for.
        for tensor, stage in enumerate(host.engine.stages(model)):
            if stage == int(_ENQUEUED):
                host.engine.wait(model, tensor)
        for device in devices:
            synchronize(device)
        host.remove_model(model)
        host.free_id(model)
