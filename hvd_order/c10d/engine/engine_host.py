"""The engine of this process, shared by all of its optimizers; one more for each process set.

One engine means one total order over all models: process groups used in different orders on
different ranks can hang.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from hvd_order import _torch as native
from hvd_order.c10d.engine import horovod_library, job_plan, link_probe, live_exchanges
from hvd_order.c10d.job import process
from hvd_order.c10d.job.request_errors import common_step
from hvd_order.c10d.parameter_server.client import ParameterServers
from hvd_order.config import Agreement, Comm, Policy
from hvd_order.errors import HvdOrderError, InvalidUsage
from hvd_order.plan.link.cut import Cut, LinkModel, reservation_lead_s
from hvd_order.same_model import name_ranks

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

__all__: list[str] = []

_log = logging.getLogger("hvd_order")

_MAX_MODELS = 256  # SliceKey::kMaxModels
_ALL_BYTES = 2**62
# Until the transport has been measured.
_FIRST_SLICE_BYTES = 2 * 2**20
_FIRST_SLICES_IN_FLIGHT = 4


class EngineHost:
    """Owns an engine, its transport and its process groups.

    Attributes:
        process_set: number of the set whose members exchange gradients; 0 is all ranks.
        ranks: of the job, by place in the set.
        rank, size: this process's place in the set, and how many it has.
        plan: that the job was told to follow, whatever model it is for; None: none.
        agreement: how the ranks agree on an order.
        servers: that sum, in place of the ranks; None: there are none.
    """

    def __init__(
        self,
        context: process.ProcessContext,
        process_set: int,
        ranks: Sequence[int],
        groups: dict[str, dist.ProcessGroup],
        comm: Comm = "allreduce",
    ) -> None:
        """Collective among the members.

        Args:
            groups: as `_new_groups` makes them.
            comm: who sums; sets other than that of all ranks sum themselves.
        """
        config = context.config
        self.context = context
        self.process_set = process_set
        self.ranks = ranks
        self.rank = ranks.index(context.rank)
        self.size = len(ranks)
        self._groups = groups
        # Objects that the ranks tell each other, here and when a model is registered.
        self.registration_group = groups["registration"]
        everybody = process_set == 0
        self.plan = job_plan.read(context, self.registration_group) if everybody else None
        self.agreement: Agreement = config.agreement or (
            "leader" if self.plan is None else self.plan.agreement
        )
        self.servers: ParameterServers | None = None
        self.transport = self._transport(comm)
        # Horovod takes up what has come once a cycle: with two it would take up one at a time.
        self.in_flight = 3 if isinstance(self.transport, native.HorovodTransport) else 2
        # What goes to servers needs no common order, so each rank's engine is one by itself, and
        # leads.
        alone = self.servers is not None
        if alone:
            self.agreement = "leader"
        control = None if alone else native.C10dControl(groups["control"], self.rank, self.size)
        slice_bytes = config.slice_bytes or min(
            _FIRST_SLICE_BYTES, config.credit_bytes or _FIRST_SLICE_BYTES
        )
        credit_bytes = config.credit_bytes or _FIRST_SLICES_IN_FLIGHT * slice_bytes
        self.cut = Cut(slice_bytes, credit_bytes, config.policy)
        self._link: LinkModel | None = None
        self.engine = native.Engine(
            rank=0 if alone else self.rank,
            size=1 if alone else self.size,
            agreement=getattr(native.AgreementKind, self.agreement.upper()),
            policy=self._policy(config.policy),
            credit_bytes=self._engine_credit(self.cut.credit_bytes),
            timeout_s=config.timeout.total_seconds(),
            stall_warning_s=config.stall_warning.total_seconds(),
            transport=self.transport,
            control=control,
        )
        self.copier = native.GradientCopier()
        self.models: set[int] = set()
        self.steps = 0  # of all optimizers together
        self.tuned = False  # an optimizer has begun to choose the cut
        self.settled = False  # and it has chosen
        self.layouts: dict[int, native.SliceLayout] = {}
        self._join_failures()
        _in_memory.add(self)

    def _join_failures(self) -> None:
        """What the coordinator of servers finds lost fails the engine."""
        if self.servers is not None and self.servers.coordinator is not None:
            self.servers.coordinator.fail = self.engine.fail

    def _transport(self, comm: Comm) -> native.TorchTransport:
        """The adapter to what carries the gradients. Collective."""
        # Servers and Horovod are there once, for all ranks; a smaller set goes its own way.
        if self.process_set == 0 and comm == "ps":
            self.servers = ParameterServers(self.context, self.registration_group)
            return self.servers.transport
        if self.process_set == 0 and horovod_library.chosen(self.context, self.registration_group):
            patience = _patience(self.context)
            path = horovod_library.start(self.context, patience, self.registration_group)
            return native.HorovodTransport(str(path), gpu_on_host=not horovod_library.has_gpu(path))
        return native.C10dTransport(self._groups["gradients"])

    @property
    def known_link(self) -> LinkModel | None:
        """What the transport was measured to do, if it was."""
        return self._link

    def link(self, device: torch.device, again: bool = False) -> LinkModel:
        """What the transport can do.

        The first call, and one ``again``, measures: it is collective, and nothing may travel then.
        """
        if self._link is None or again:
            self._link = link_probe.measure(self.transport, device, self.in_flight)
        return self._link

    def retune(self, cut: Cut, model: int) -> None:
        """Changes policy and credit; every rank does so between the same two steps.

        Args:
            model: it is about to be cut so.
        """
        # Other optimizers' slices must fit as well, also those of models that only some ranks
        # have forgotten: credit must not differ.
        others = [layout for m, layout in self.layouts.items() if m != model]
        largest = max((layout.largest_slice_bytes for layout in others), default=0)
        credit_bytes = max(cut.credit_bytes, largest)
        lead_s = reservation_lead_s(self._link, cut) if self._link is not None else 0.0
        if self.servers is not None:
            lead_s = 0.0
        self.engine.retune(self._policy(cut.policy), self._engine_credit(credit_bytes), lead_s)
        self.cut = cut

    def _engine_credit(self, credit_bytes: int) -> int:
        """What the engine may have in flight.

        For servers: all. Workers push in orders of their own, so if each waited for the sums of
        what it has sent, they could wait for each other. The lines to the servers have the order
        and the credit instead.
        """
        return credit_bytes if self.servers is None else _ALL_BYTES

    def _policy(self, name: Policy) -> native.Policy:
        """A static plan holds whatever policy it was made with."""
        if self.agreement == "planned":
            return native.Policy.PLANNED
        return native.Policy.ARRIVAL if name == "arrival" else native.Policy.PRIORITY

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
            parameters: by tensor, elements and group, where servers update.
        """
        if isinstance(self.transport, native.HorovodTransport):
            horovod_library.check(buffers)
        if self.servers is not None:
            element_bytes = [buffer.element_size() for buffer in buffers]
            self.servers.prepare(model, layout, element_bytes, parameters)
        self.transport.set_buffers(model, buffers, layout)
        if self.servers is not None:
            self.servers.registered(model)
        self.engine.add_model(model, layout, plan)
        self.models.add(model)
        self.layouts[model] = layout

    def remove_model(self, model: int) -> None:
        """Forgets an idle model. Its layout is kept for the names in the timeline."""
        self.engine.remove_model(model)
        if self.servers is not None:
            self.servers.forget(model)
        self.transport.remove_buffers(model)
        self.models.discard(model)

    def step_taken(self) -> None:
        """An optimizer has taken a step."""
        self.steps += 1
        if self.servers is not None and self.servers.coordinator is not None:
            self.servers.coordinator.step_taken()

    def free_id(self, taken_anywhere: set[int]) -> int:
        """The lowest model id that no rank uses."""
        return next(i for i in range(_MAX_MODELS) if i not in taken_anywhere)

    def finish(self) -> None:
        """Finishes outstanding updates, and waits until no other rank needs this one for theirs.

        Where the job has failed there is nothing to wait for: readers of what is outstanding get
        the error, as before.

        Raises:
            HorovodInternalError: an update could not be finished.
        """
        try:
            self.engine.check()
        except HvdOrderError:
            return
        for exchange in live_exchanges.live(self):
            exchange.end()
        timeout_s = self.context.config.timeout.total_seconds()
        late = self.engine.farewell(timeout_s)
        if late:
            _log.warning(
                "rank %d leaves, though %s did not finish the last step within %g s "
                "(HVD_ORDER_TIMEOUT)",
                self.context.rank, name_ranks([self.ranks[place] for place in late]), timeout_s,
            )  # fmt: skip

    def close(self) -> None:
        """Tells the other ranks and stops the engine."""
        self.engine.shutdown()
        if self.servers is not None:
            self.servers.close()

    def drop_groups(self) -> None:
        """Gives the process groups back before the shutdown of the job; the engine is closed."""
        for group in self._groups.values():
            self.context.drop_group(group)


def _patience(context: process.ProcessContext) -> timedelta:
    """The engine notices a stall first and can name the cause; a group's own timeout is behind."""
    return context.config.timeout * 1.25


def _new_groups(
    context: process.ProcessContext, ranks: list[int] | None
) -> dict[str, dist.ProcessGroup]:
    """The process groups of an engine. Collective over all ranks of the job.

    Those for objects that ranks tell each other, for control messages and for gradients.
    """
    patience = _patience(context)
    return {
        purpose: context.new_group(purpose, backend, patience, ranks)
        for purpose, backend in (("registration", "gloo"), ("control", "gloo"), ("gradients", None))
    }


_in_memory: weakref.WeakSet[EngineHost] = weakref.WeakSet()
_hosts: dict[int, EngineHost] = {}  # by process set
_groups: dict[int, dict[str, dist.ProcessGroup]] = {}  # of sets whose engine is not needed yet
_hosts_context: process.ProcessContext | None = None
_is_recording = False
_before_close: list[Callable[[], None]] = []


def engine_host(
    process_set: int = 0, ranks: Sequence[int] | None = None, comm: Comm | None = None
) -> EngineHost:
    """The engine of a process set, of which this process is a member. First called together.

    Args:
        process_set: its number; 0 is all ranks.
        ranks: the members; None: all ranks.
        comm: who sums; None: as the engine that there is does, else as HVD_ORDER_COMM says.

    Raises:
        NotInitialized: before ``init()``.
        InvalidUsage: another optimizer's gradients go another way.
    """
    global _hosts_context
    context = process.current()
    if _hosts_context is not context:
        _hosts.clear()
        _hosts_context = context
    if process_set not in _hosts:
        members = range(context.size) if ranks is None else ranks
        groups = _groups.pop(process_set, None) or _new_groups(context, None)
        with common_step(context, "the first steps", kind=f"host {process_set}", ranks=members):
            host = _hosts[process_set] = EngineHost(
                context, process_set, members, groups, comm or context.config.comm
            )
        if _is_recording:
            host.engine.start_recording()
        context.on_shutdown(_close)  # the last registered runs first: before the transport ends
    if comm is not None and (comm == "ps") != (_hosts[process_set].servers is not None):
        raise InvalidUsage(
            f"comm={comm!r}, but gradients of another optimizer go the other way; all optimizers "
            "of a job go one way"
        )
    return _hosts[process_set]


def open_groups(process_set: int, ranks: Sequence[int]) -> None:
    """Makes the process groups for the engine of a set. Collective over all ranks of the job.

    torch.distributed has no way to make them later, by the members alone, that works if these
    have different numbers of groups already.
    """
    context = process.current()
    _groups[process_set] = _new_groups(context, list(ranks))


def running_host() -> EngineHost | None:
    """The engine of all ranks, if there is one; creates none."""
    return _hosts.get(0)


def hosts_in_memory() -> list[EngineHost]:
    """Those that have been closed as well, while anything holds them."""
    return list(_in_memory)


def running_hosts() -> list[EngineHost]:
    """The engines of this process; creates none."""
    return list(_hosts.values())


def record(on: bool) -> None:
    """Has all engines, those to come as well, note what happens when, or note no more."""
    global _is_recording
    _is_recording = on
    for host in running_hosts():
        if on:
            host.engine.start_recording()
        else:
            host.engine.stop_recording()


def before_close(callback: Callable[[], None]) -> None:
    """Has `callback` run at every shutdown while the engines still run."""
    _before_close.append(callback)


def close_host(process_set: int) -> None:
    """Ends the engine of a process set that is given up, if it has one."""
    host = _hosts.pop(process_set, None)
    if host is not None:
        try:
            host.finish()
        finally:
            host.close()
            host.drop_groups()
    for group in _groups.pop(process_set, {}).values():
        process.current().drop_group(group)


def _close() -> None:
    hosts = list(_hosts.values())
    try:
        if not any(host.context.abandoned for host in hosts):
            _finish(hosts)
    finally:
        try:
            for callback in _before_close:
                callback()
        finally:
            _groups.clear()
            _hosts.clear()
            for host in hosts:
                host.close()


def _finish(hosts: Sequence[EngineHost]) -> None:
    """As `EngineHost.finish`, for all of them, whatever happens with one."""
    first_error: Exception | None = None
    for host in hosts:
        try:
            host.finish()
        except Exception as error:
            first_error = first_error or error
    if first_error is not None:
        raise first_error
