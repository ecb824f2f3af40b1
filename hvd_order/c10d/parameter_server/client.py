"""A worker's end of the parameter servers."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from hvd_order import _torch as native
from hvd_order.c10d.job import group_collectives
from hvd_order.c10d.parameter_server import connections, messages, orders, signs_of_life
from hvd_order.c10d.parameter_server.coordinator import Coordinator
from hvd_order.config import Config
from hvd_order.errors import HvdOrderError, InvalidUsage
from hvd_order.server.access.secret import load_secret

if TYPE_CHECKING:
    from hvd_order.c10d.job.process import ProcessContext

__all__ = ["ParameterServers"]

_log = logging.getLogger("hvd_order")


class ParameterServers:
    """The links to all servers, and the transport that uses them.

    Attributes:
        transport: carries slices to the servers and back.
        coordinator: decides who holds what; on worker 0 only.
    """

    def __init__(self, context: ProcessContext, group: dist.ProcessGroup) -> None:
        """Finds the servers that the job begins with. Collective.

        Args:
            group: for objects, of all workers.

        Raises:
            InvalidUsage: the job has no servers.
            TransferTimeout, PeerLost, NotTrusted: a server cannot be reached.
        """
        config = context.config
        count, address = _whereabouts(config)
        self._context = context
        self._group = group
        self._timeout = config.timeout
        self._key = load_secret(os.environ)
        self._me = f"worker {context.rank}"
        self._meeting = connections.MeetingPoint(address, config.timeout, patience=config.timeout)
        self._answers = messages.Answers(self._timeout)
        self.coordinator: Coordinator | None = None
        self._orders: orders.Orders | None = None
        self.transport = native.ServerTransport(
            rank=context.rank,
            workers=context.size,
            ordered=config.policy == "priority",
            asks_first=config.ps_delay_bound is not None,
            on_lost=self._lost,
            on_control=self._answers.take,
        )
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
        if context.rank == 0:
            self.coordinator = Coordinator(config, self.transport, self._answers)
            self._orders = orders.Orders(self._meeting, self._key, self.coordinator)
        self._lookout = connections.Lookout(self._meeting, count, self._server_joined)
        self._watch: signs_of_life.Watch | None = None
        # Where all go on without a server, worker 0 alone says which; else each sees its own end.
        if context.rank == 0 or not config.ps_replicas:
            limit = signs_of_life.longest_silence(config)
            self._watch = signs_of_life.Watch(self._meeting, self.transport, limit)

    # ---- servers come and go ------------------------------------------------------------------

    def _connect(self, server: int, others: Sequence[int]) -> None:
        link = connections.take_part(self._meeting, self._key, self._me, server, self._timeout)
        self.transport.connect(server, link)
        # Behind the models, which connect() has told it of.
        self.transport.send_control(server, messages.ready(others))

    def _server_joined(self, server: int) -> None:
        """On the lookout's thread."""
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
        """On the link's thread, which must not wait for another's."""
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
        element_bytes: Sequence[int],
        parameters: Sequence[tuple[int, int]],
    ) -> None:
        """Says who holds the slices of a model that is about to be registered. Collective.

        Args:
            element_bytes: of each gradient buffer.
            parameters: by tensor, elements and group of its rule, where servers update; else empty.
        """
        places: list[tuple[int, int]] = []
        if self.coordinator is not None:
            places = self.coordinator.place(model, layout, element_bytes)
        places = group_collectives.share_object(places, 0, self._group)
        self.transport.prepare(model, places, list(parameters))

    def registered(self, model: int) -> None:
        """The transport has got the buffers of a model that was prepared."""
        if self.coordinator is not None:
            self.coordinator.registered(model)

    def forget(self, model: int) -> None:
        """A model is gone."""
        if self.coordinator is not None:
            self.coordinator.forget(model)

    def close(self) -> None:
        """Takes leave of the servers, which end when all workers have."""
        if self._orders is not None:
            self._orders.close()
        if self._watch is not None:
            self._watch.close()
        self._lookout.close()
        self._report_updates()
        self.transport.close()

    def _report_updates(self) -> None:
        for (slices, size_bytes), what in (
            (self.transport.dropped(), "came too late and were not sent"),
            (self.transport.aggregated(), "were added up with others' on their way"),
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
            "HVD_ORDER_SERVER_STORE (docs/parameter-server.md)"
        )
    return config.servers, config.server_store
