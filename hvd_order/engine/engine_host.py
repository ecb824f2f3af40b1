"""The engine of this process, shared by all of its optimizers; each process set adds one.

One engine means one total order over all models: process groups used in different orders on
different ranks can hang.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hvd_order._native import _torch as native
from hvd_order.base.config import Agreement, Comm
from hvd_order.base.errors import HvdOrderError, InvalidUsage
from hvd_order.base.link.link_model import LinkModel
from hvd_order.base.link.slice_settings import SliceSettings, reservation_lead_s
from hvd_order.base.same_model import name_ranks
from hvd_order.engine import job_plan, link_probe, live_exchanges
from hvd_order.engine.job.job import Job, current, held
from hvd_order.engine.job.request_errors import common_step
from hvd_order.engine.ticket_lock import TicketLock
from hvd_order.engine.transport_choice import choose_transport

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

__all__: list[str] = []

_log = logging.getLogger("hvd_order")

_MAX_MODELS = 256  # SliceKey::kMaxModels
_ALL_BYTES = 2**62
# Used until the transport has been measured.
_FIRST_SLICE_BYTES = 2 * 2**20
_FIRST_SLICES_IN_FLIGHT = 4

Transfer = tuple[native.SliceLayout, native.SliceEvent]
"""A recorded transfer and the layout of its slice."""


class EngineHost:
    """Owns an engine, its transport and its process groups.

    Attributes:
        process_set: number of the set whose members exchange gradients; 0 is all ranks.
        ranks: ranks in the job, by place in the set.
        rank, size: this process's place in the set, and the size of the set.
        plan: plan given to the job, for whichever model it was made; None: no plan.
        slice_settings: the settings in use; changed in a turn only.
        ticket_lock: turns at what all models share.
        models: the ids that this rank uses or is about to use.
        choice: the transport, and how it is used.
    """

    def __init__(
        self,
        job: Job,
        process_set: int,
        ranks: Sequence[int],
        groups: dict[str, dist.ProcessGroup],
        comm: Comm = "allreduce",
    ) -> None:
        """Creates the engine. Collective among the members.

        Args:
            job: the current job.
            process_set: number of the set.
            ranks: ranks in the job, by place in the set.
            groups: process groups as made by `_new_groups`.
            comm: who sums; every set other than that of all ranks sums by itself.
        """
        config = job.config
        self.job = job
        self.process_set = process_set
        self.ranks = ranks
        self.rank = ranks.index(job.rank)
        self.size = len(ranks)
        self._groups = groups
        # Carries objects between ranks, here and when a model is registered.
        self.registration_group = groups["registration"]
        everybody = process_set == 0
        self.plan = job_plan.read(job, self.registration_group) if everybody else None
        agreement: Agreement = config.agreement or (
            "leader" if self.plan is None else self.plan.agreement
        )
        self.choice = choice = choose_transport(job, comm, groups, everybody)
        self.transport = choice.transport
        independent = choice.independent
        if not choice.ranks_sum:
            agreement = "leader"
        control = (
            None if independent else native.C10dControl(groups["control"], self.rank, self.size)
        )
        slice_bytes = config.slice_bytes or min(
            _FIRST_SLICE_BYTES, config.credit_bytes or _FIRST_SLICE_BYTES
        )
        credit_bytes = config.credit_bytes or _FIRST_SLICES_IN_FLIGHT * slice_bytes
        self.slice_settings = SliceSettings(
            slice_bytes, credit_bytes, config.policy, agreement, config.cross_iteration
        )
        self.first_agreement: Agreement = agreement  # what the job begins with
        self._link: LinkModel | None = None
        self.has_halves: bool | None = None  # see half_forms.py; None: not known
        self.knows_hosts = False  # see host_levels.py
        self.engine = native.Engine(
            rank=0 if independent else self.rank,
            size=1 if independent else self.size,
            agreement=_native_agreement(agreement),
            policy=self._policy(self.slice_settings),
            credit_bytes=self._engine_credit(self.slice_settings.credit_bytes),
            timeout_s=config.timeout.total_seconds(),
            stall_warning_s=config.stall_warning.total_seconds(),
            transport=self.transport,
            control=control,
        )
        self._set_issues_ahead()
        self.copier = native.GradientCopier()
        self.ticket_lock = TicketLock()
        self.models: set[int] = set()
        self.steps = 0  # steps of all optimizers together
        # Changed in a turn, so inside a turn they are the same on all ranks.
        self.shared = False  # a second model has been registered, on all ranks
        self.shared_on: threading.Thread | None = None  # where it was first
        self.tuning_begun = False  # an optimizer has begun to tune the slice settings
        self.tuning_ended = False  # an optimizer has finished tuning them
        self.layouts: dict[int, native.SliceLayout] = {}
        self._transfers: list[Transfer] = []  # recorded, of layouts that are gone
        choice.peer.fails_by(self.engine.fail)
        _in_memory.add(self)

    @property
    def known_link(self) -> LinkModel | None:
        """The measured link model; None before a measurement."""
        return self._link

    def measure_link(self, device: torch.device, longest: Callable[[float], float]) -> LinkModel:
        """Measures the link model of the transport. Collective; nothing may be in flight.

        Args:
            longest: returns the largest of the ranks' values.
        """
        self._link = link_probe.measure(self.transport, device, self.choice.in_flight, longest)
        return self._link

    def retune(self, settings: SliceSettings, model: int) -> None:
        """Changes agreement, policy and credit; every rank does so between the same two steps.

        Args:
            settings: the new slice settings. Only a host without another model can change the
                agreement.
            model: the model that is about to be cut with them.
        """
        # The slices of other models must fit too, including models that only some ranks have
        # forgotten: credit must be the same on all ranks.
        others = [layout for m, layout in self.layouts.items() if m != model]
        largest = max((layout.largest_slice_bytes for layout in others), default=0)
        credit_bytes = max(settings.credit_bytes, largest)
        lead_s = 0.0
        if self._link is not None and self.choice.ranks_sum:
            lead_s = reservation_lead_s(self._link, settings)
        self.engine.retune(
            _native_agreement(settings.agreement), self._policy(settings),
            self._engine_credit(credit_bytes), lead_s,
        )  # fmt: skip
        self.slice_settings = settings
        self._set_issues_ahead()

    def _set_issues_ahead(self) -> None:
        """Lets a device wait for gradients of a planned order: the order of issue is known before
        they are computed.
        """
        ahead = self.agreement == "planned" and "host_waits" not in self.job.config.debug
        self.transport.set_issues_ahead(ahead)

    def end_plan(self, issued: int) -> None:
        """Goes back from a planned order to the leader's, while gradients may be under way.

        Args:
            issued: the largest result of the engine's ``hold_plan`` on any rank.
        """
        self.slice_settings = replace(
            self.slice_settings, agreement="leader", cross_iteration=self.job.config.cross_iteration
        )
        self.engine.end_plan(
            issued, native.AgreementKind.LEADER, self._policy(self.slice_settings)
        )  # fmt: skip
        self._set_issues_ahead()

    def _engine_credit(self, credit_bytes: int) -> int:
        """Returns the credit of the engine."""
        credits = self.choice.credits
        return _ALL_BYTES if credits is None else credit_bytes * credits

    @property
    def agreement(self) -> Agreement:
        """How the ranks agree on an order."""
        return self.slice_settings.agreement

    @staticmethod
    def _policy(settings: SliceSettings) -> native.Policy:
        """Returns the native policy; a static plan applies whichever policy it was made with."""
        if settings.agreement == "planned":
            return native.Policy.PLANNED
        arrival = settings.policy == "arrival"
        return native.Policy.ARRIVAL if arrival else native.Policy.PRIORITY

    def add_model(
        self,
        model: int,
        layout: native.SliceLayout,
        buffers: list[torch.Tensor],
        plan: list[int],
        parameters: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Registers gradient buffers under an id that is free on every rank.

        Args:
            model: the id.
            layout: slices of the buffers.
            buffers: the gradient buffers.
            plan: order of the slices for planned agreement.
            parameters: (elements, group) of each tensor, where servers update.
        """
        self.choice.peer.prepare(model, layout, buffers, parameters)
        self.transport.set_buffers(model, buffers, layout)
        self.choice.peer.registered(model)
        self.engine.add_model(model, layout, plan)
        self.models.add(model)
        self._transfers = self.take_transfers()
        self.layouts[model] = layout

    def remove_model(self, model: int) -> None:
        """Removes an idle model; its id stays taken. Its layout is kept until another model has
        its id.
        """
        self.engine.remove_model(model)
        self.choice.peer.forget(model)
        self.transport.remove_buffers(model)

    def free_id(self, model: int) -> None:
        """Lets other models have the id of a model that has been removed."""
        self.models.discard(model)

    def take_transfers(self) -> list[Transfer]:
        """Returns the transfers recorded since the last call, with the layouts of their slices."""
        before, self._transfers = self._transfers, []
        return before + [(self.layouts[e.model], e) for e in self.engine.take_events()]

    def step_taken(self) -> None:
        """Records that an optimizer has taken a step."""
        self.steps += 1
        self.choice.peer.step_taken()

    def take_id(self, taken_anywhere: set[int]) -> int:
        """Takes the lowest model id that no rank uses, and returns it.

        Raises:
            InvalidUsage: there is none.
        """
        model = next((i for i in range(_MAX_MODELS) if i not in taken_anywhere), None)
        if model is None:
            raise InvalidUsage(f"at most {_MAX_MODELS} models can be registered")
        self.models.add(model)
        return model

    def finish(self) -> None:
        """Applies deferred updates, and waits until no other rank needs this one for its own.

        After a failure of the job there is nothing to wait for: readers of deferred updates still
        get the error.

        Raises:
            HorovodInternalError: an update could not be applied.
        """
        try:
            self.engine.check()
        except HvdOrderError:
            return
        for exchange in live_exchanges.live(self):
            exchange.end()
        timeout_s = self.job.config.timeout.total_seconds()
        late = self.engine.shutdown_barrier(timeout_s)
        if late:
            _log.warning(
                "rank %d leaves, though %s did not finish the last step within %g s "
                "(HVD_ORDER_TIMEOUT)",
                self.job.rank, name_ranks([self.ranks[place] for place in late]), timeout_s,
            )  # fmt: skip

    def close(self) -> None:
        """Notifies the other ranks and stops the engine."""
        self.engine.shutdown()
        self.choice.peer.close()

    def drop_groups(self) -> None:
        """Destroys the process groups before the shutdown of the job; the engine is closed."""
        for group in self._groups.values():
            self.job.drop_group(group)


def _native_agreement(name: Agreement) -> native.AgreementKind:
    kind: native.AgreementKind = getattr(native.AgreementKind, name.upper())
    return kind


def _new_groups(job: Job, ranks: list[int] | None) -> dict[str, dist.ProcessGroup]:
    """Makes the process groups of an engine. Collective over all ranks of the job.

    One group carries objects between ranks, one control messages and one gradients.
    """
    patience = job.patience
    return {
        "registration": job.new_group("registration", "gloo", patience, ranks),
        "control": job.new_group("control", "gloo", patience, ranks, "messages"),
        "gradients": job.new_group("gradients", None, patience, ranks, "at once"),
    }


# Of the process and not of a job: a forked child must not destroy the engine of any job.
_in_memory: weakref.WeakSet[EngineHost] = weakref.WeakSet()


class Engines:
    """The engines of one job: a part of the `Job`.

    Attributes:
        hosts: the engines by process set.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self.hosts: dict[int, EngineHost] = {}
        # Groups of sets without an engine yet.
        self._groups: dict[int, dict[str, dist.ProcessGroup]] = {}
        self._making: dict[int, threading.Lock] = {}
        self._is_recording = False
        self._before_close: list[Callable[[], None]] = []

    def of_set(
        self, process_set: int, ranks: Sequence[int] | None, comm: Comm | None
    ) -> EngineHost:
        """See `engine_host`."""
        job = self._job
        # A lock for each set: the other ranks' threads may make another set's engine first.
        with self._making.setdefault(process_set, threading.Lock()):
            if process_set not in self.hosts:
                self._make(process_set, range(job.size) if ranks is None else ranks, comm)
        if comm not in (None, self.hosts[process_set].choice.comm):
            raise InvalidUsage(
                f"comm={comm!r}, but gradients of another optimizer go the other way; all "
                "optimizers of a job go one way"
            )
        return self.hosts[process_set]

    def _make(self, process_set: int, members: Sequence[int], comm: Comm | None) -> None:
        job = self._job
        groups = self._groups.pop(process_set, None) or _new_groups(job, None)
        with common_step(job, "the first steps", kind=f"host {process_set}", ranks=members):
            host = EngineHost(job, process_set, members, groups, comm or job.config.comm)
        if self._is_recording:
            host.engine.start_recording()
        self.hosts[process_set] = host
        # Last registered runs first: the engine ends before what it was made after.
        job.on_shutdown(self._close)

    def open_groups(self, process_set: int, ranks: Sequence[int]) -> None:
        """See the function `open_groups`."""
        self._groups[process_set] = _new_groups(self._job, list(ranks))

    def record(self, on: bool) -> None:
        """Starts or stops recording of events on all engines, present and future."""
        self._is_recording = on
        for host in self.hosts.values():
            if on:
                host.engine.start_recording()
            else:
                host.engine.stop_recording()

    def before_close(self, callback: Callable[[], None]) -> None:
        """Runs `callback` at shutdown, after the last updates, while the engines still run."""
        self._before_close.append(callback)

    def close_set(self, process_set: int) -> None:
        """Ends the engine of a process set that is being removed, if it has one."""
        host = self.hosts.pop(process_set, None)
        if host is not None:
            try:
                host.finish()
            finally:
                host.close()
                host.drop_groups()
        for group in self._groups.pop(process_set, {}).values():
            self._job.drop_group(group)

    def _close(self) -> None:
        hosts = list(self.hosts.values())
        try:
            if not self._job.abandoned:
                _finish(hosts)
        finally:
            try:
                for callback in self._before_close:
                    callback()
            finally:
                self.hosts.clear()
                for host in hosts:
                    host.close()


def engine_host(
    process_set: int = 0, ranks: Sequence[int] | None = None, comm: Comm | None = None
) -> EngineHost:
    """Returns the engine of a process set that this process belongs to. The first call is
    collective.

    Args:
        process_set: number of the set; 0 is all ranks.
        ranks: the members; None: all ranks.
        comm: who sums; None: same as the existing engine, or HVD_ORDER_COMM if there is none.

    Raises:
        NotInitialized: before ``init()``.
        InvalidUsage: another optimizer's gradients use the other kind of communication.
    """
    return current().part(Engines).of_set(process_set, ranks, comm)


def open_groups(process_set: int, ranks: Sequence[int]) -> None:
    """Makes the process groups for the engine of a set. Collective over all ranks of the job.

    torch.distributed offers no way for the members alone to make them later that works when
    members already have different numbers of groups.
    """
    current().part(Engines).open_groups(process_set, ranks)


def running_host() -> EngineHost | None:
    """Returns the engine of all ranks, or None; creates none."""
    job = held()
    engines = None if job is None else job.existing_part(Engines)
    return None if engines is None else engines.hosts.get(0)


def hosts_in_memory() -> list[EngineHost]:
    """Returns the engines that are still referenced, including closed ones."""
    return list(_in_memory)


def close_host(process_set: int) -> None:
    """Ends the engine of a process set that is being removed, if it has one."""
    current().part(Engines).close_set(process_set)


def _finish(hosts: Sequence[EngineHost]) -> None:
    """Runs `EngineHost.finish` on all hosts, then raises the first error."""
    first_error: Exception | None = None
    for host in hosts:
        try:
            host.finish()
        except Exception as error:
            first_error = first_error or error
    if first_error is not None:
        raise first_error
