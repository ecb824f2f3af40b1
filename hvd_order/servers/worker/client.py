"""A worker's end of the parameter servers."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hvd_order._native import _torch as native
from hvd_order.base.config import Config
from hvd_order.base.errors import HvdOrderError, InvalidUsage
from hvd_order.base.link.busy_union import ReceivedTimes
from hvd_order.engine.job import group_collectives
from hvd_order.engine.transport_choice import CHOICES, TransportChoice, TransportPeer
from hvd_order.servers.access.secret import load_secret
from hvd_order.servers.costs import ServerTimes, UpdateTimes
from hvd_order.servers.process import heartbeat, messages, orders
from hvd_order.servers.process.coordinator import Coordinator
from hvd_order.servers.worker import connections

if TYPE_CHECKING:
    from hvd_order.engine.engine_host import EngineHost
    from hvd_order.engine.job.job import Job

__all__ = ["ParameterServers", "require_servers", "servers_of"]

_log = logging.getLogger("hvd_order")


class ParameterServers(TransportPeer):
    """The connections to all servers, and the transport that uses them.

    Attributes:
        transport: carries slices to the servers and back.
        coordinator: assigns slices to servers; on worker 0 only.
    """

    def __init__(self, job: Job, group: dist.ProcessGroup) -> None:
        """Connects to the servers that the job starts with. Collective.

        Args:
            job: the current job.
            group: carries objects, of all workers.

        Raises:
            InvalidUsage: the job has no servers.
            TransferTimeout, PeerLost, NotTrusted: a server cannot be reached.
        """
        config = job.config
        count, address = _whereabouts(config)
        self._job = job
        self._group = group
        self._timeout = config.timeout
        self._key = load_secret(os.environ)
        self._me = f"worker {job.rank}"
        self._meeting = connections.MeetingPoint(address, config.timeout, patience=config.timeout)
        self._answers = messages.ServerAnswers(self._timeout)
        self.coordinator: Coordinator | None = None
        self._orders: orders.Orders | None = None
        self.transport = native.ServerTransport(
            rank=job.rank,
            workers=job.size,
            ordered=config.policy == "priority",
            asks_first=config.ps_delay_bound is not None,
            on_lost=self._lost,
            on_control=self._answers.take,
        )
        self._links: dict[int, native.PairConnection] = {}
        store = self._meeting.own()
        for server in range(count):
            connections.wait_for(
                store, f"server/{server}", self._timeout, f"server {server} has not come"
            )
            self._connect(server, range(count))
        for server in range(count):
            connections.wait_for(
                store, f"server/{server}/ready", self._timeout,
                f"server {server} has not got its links to all others",
            )  # fmt: skip
        if job.rank == 0:
            self.coordinator = Coordinator(config, self.transport, self._answers)
            self._orders = orders.Orders(self._meeting, self._key, self.coordinator)
        self._lookout = connections.Lookout(self._meeting, count, self._server_joined)
        self._monitor: heartbeat.HeartbeatMonitor | None = None
        # With replicas, all workers continue without a lost server, and worker 0 alone decides
        # which one is lost; otherwise each worker detects the loss itself.
        if job.rank == 0 or not config.ps_replicas:
            limit = heartbeat.longest_silence(config)
            self._monitor = heartbeat.HeartbeatMonitor(self._meeting, self.transport, limit)

    # ---- servers join and leave ---------------------------------------------------------------

    def _connect(self, server: int, others: Sequence[int]) -> None:
        link = connections.take_part(self._meeting, self._key, self._me, server, self._timeout)
        self._links[server] = link
        self.transport.connect(server, link)
        # After the models, which connect() has sent to the server.
        self.transport.send_control(server, messages.ready(others))

    def _server_joined(self, server: int) -> None:
        """Connects to a new server; runs on the lookout's thread."""
        try:
            others = self.transport.servers()
            self._connect(server, others)
            if self.coordinator is not None:
                store = self._meeting.own()
                connections.wait_for(
                    store, f"server/{server}/ready", self._timeout,
                    f"server {server} has not got its links to all others",
                )  # fmt: skip
                self.coordinator.server_joined(server)
        except HvdOrderError as error:
            _log.warning("%s goes on without server %d: %s", self._me, server, error)

    def _lost(self, server: int, why: str) -> None:
        """Reports a lost server on the connection's thread, which must not wait for another."""
        coordinator = self.coordinator
        if coordinator is not None:
            threading.Thread(
                target=coordinator.lost, args=(server, why), name="server lost", daemon=True
            ).start()

    # ---- models -------------------------------------------------------------------------------

    def prepare(
        self,
        model: int,
        layout: native.SliceLayout,
        buffers: Sequence[torch.Tensor],
        parameters: Sequence[tuple[int, int]],
    ) -> None:
        """Shares which server holds each slice of a model about to be registered. Collective.

        Args:
            model: id of the model.
            layout: its slices.
            buffers: those of its gradients; not needed here.
            parameters: (elements, group of its update rule) of each tensor, where servers update;
                else empty.
        """
        del buffers
        places: list[tuple[int, int]] = []
        if self.coordinator is not None:
            places = self.coordinator.place(model, layout)
        places = group_collectives.share_object(places, 0, self._group)
        self.transport.prepare(model, places, list(parameters))

    def registered(self, model: int) -> None:
        """Records that the transport has the buffers of a prepared model."""
        if self.coordinator is not None:
            self.coordinator.registered(model)

    def forget(self, model: int) -> None:
        """Forgets a removed model."""
        if self.coordinator is not None:
            self.coordinator.forget(model)

    # ---- the job ------------------------------------------------------------------------------

    def step_taken(self) -> None:
        """Counts the steps of all optimizers, on worker 0."""
        if self.coordinator is not None:
            self.coordinator.step_taken()

    def fails_by(self, fail: Callable[[str], None]) -> None:
        """Takes what ends the job when a server is lost."""
        if self.coordinator is not None:
            self.coordinator.fail = fail

    # ---- times, for a profile -----------------------------------------------------------------

    def record(self) -> None:
        """Begins to record the times of transfers and of the servers' work on them."""
        for server in self.transport.servers():
            self._links[server].record(True)
            self.transport.send_control(server, messages.RECORD)

    def take_times(self) -> list[ServerTimes]:
        """Ends the recording.

        Returns:
            What this worker and each server have recorded, by server.

        Raises:
            PeerLost, TransferTimeout: a server is gone, or does not answer.
        """
        servers = self.transport.servers()
        for server in servers:
            self._links[server].record(False)
            self._answers.forget("times", server)
            self.transport.send_control(server, messages.ask("times"))
        found = []
        for server in servers:
            told = self._answers.wait("times", server)
            found.append(
                ServerTimes(
                    [ReceivedTimes(*each) for each in told["pushes"]],
                    [UpdateTimes(*each) for each in told["updates"]],
                    [ReceivedTimes(*each) for each in self._links[server].take_received()],
                    told["host"] == connections.host_name(),
                )
            )
        return found

    def close(self) -> None:
        """Tells the servers that this worker leaves; they end when all workers have left."""
        if self._orders is not None:
            self._orders.close()
        if self._monitor is not None:
            self._monitor.close()
        self._lookout.close()
        self._report_updates()
        self._links.clear()  # the last to hold a connection must not be the interpreter's end
        self.transport.close()

    def _report_updates(self) -> None:
        for (slices, size_bytes), what in (
            (self.transport.dropped(), "came too late and were not sent"),
            (self.transport.aggregated(), "were added up with others' in flight"),
        ):
            if slices:
                _log.info(
                    "%s: %d updates of slices %s (%.1f MB)",
                    self._me, slices, what, size_bytes / 1e6,
                )  # fmt: skip


def _whereabouts(config: Config) -> tuple[int, str]:
    if config.servers is None or config.server_store is None:
        raise InvalidUsage(
            "gradients are to go to parameter servers (comm=ps), but the job has none; start it "
            "with: hvd-order run -np N --servers M ..., or set HVD_ORDER_SERVERS and "
            "HVD_ORDER_SERVER_STORE (documentation: Parameter servers)"
        )
    return config.servers, config.server_store


def servers_of(host: EngineHost) -> ParameterServers | None:
    """The servers behind an engine; None if the ranks sum."""
    peer = host.choice.peer
    return peer if isinstance(peer, ParameterServers) else None


def require_servers(host: EngineHost) -> ParameterServers:
    """The servers behind an engine that has some."""
    servers = servers_of(host)
    assert servers is not None
    return servers


def _choose(job: Job, group: dist.ProcessGroup) -> TransportChoice:
    config = job.config
    servers = ParameterServers(job, group)
    in_step = config.ps_mode == "sync"
    return TransportChoice(
        servers.transport,
        "ps",
        servers,
        updates=config.ps_update == "server",
        # Asynchronous workers have no step in common, so each one's engine runs alone, as its own
        # leader; so does that of a single worker. Synchronous ones agree on an order, although
        # servers need none: a slice is complete when all workers have pushed it
        # (docs/decisions/order-on-servers.md).
        independent=not in_step or job.size == 1,
        in_step=in_step,
        pushers=job.size if in_step else 1,
        # As many as the job was started with: it must be the same on all ranks while servers come
        # and go. For asynchronous workers, only the connections apply order and credit.
        credits=config.servers if in_step else None,
    )


CHOICES.register("ps", _choose)
