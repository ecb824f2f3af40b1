"""Worker 0's decisions: the assignment of slices as servers slow down, join and leave."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence

from hvd_order._native import _torch as native
from hvd_order.base.config import Config
from hvd_order.base.errors import InvalidUsage, PeerLost, TransferTimeout
from hvd_order.servers.balance import assignment
from hvd_order.servers.balance.balancer import Balancer
from hvd_order.servers.process import messages
from hvd_order.servers.process.scale_requests import ScaleRequests
from hvd_order.servers.process.scaling import Scaling
from hvd_order.servers.scaling.policy import ScalingPolicy

__all__ = ["Coordinator"]

_log = logging.getLogger("hvd_order")

Places = list[tuple[int, int]]
"""Owner and replica of each slice; -1: no replica."""

_ASK_AGAIN_S = 0.1
_ARRIVE_S = 5.0  # for data that a server sent before it was lost


class _Placed:
    """The slices of one model."""

    def __init__(self, sizes: Sequence[int], owners: assignment.Assignment) -> None:
        self.sizes = sizes
        self.owners = owners
        self.replicas: tuple[int, ...] = ()
        self.balancer: Balancer | None = None
        self.registered = False  # whether the transport has the model
        self.changed = False  # since it was placed


class Coordinator:
    """Assigns slices to servers, on worker 0.

    Thread safety: all methods may be called from any thread.
    """

    def __init__(
        self,
        config: Config,
        transport: native.ServerTransport,
        answers: messages.ServerAnswers,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Creates a coordinator without models.

        Args:
            config: the knobs.
            transport: has connections to all servers.
            answers: answers of servers, as they arrive over those connections.
            clock: returns seconds.
        """
        self._config = config
        self._transport = transport
        self._answers = answers
        self._lock = threading.Lock()  # guards the fields below
        self._servers: set[int] = set(transport.servers())
        self._models: dict[int, _Placed] = {}
        self._clock = clock
        self._last_step_s = math.nan  # end of the last step
        self._scaling: Scaling | None = None
        self._closing = threading.Event()
        self.fail: Callable[[str], None] = _log.error  # the engine's, after it was created

    def place(self, model: int, layout: native.SliceLayout) -> Places:
        """Assigns the slices of a model that is about to be registered.

        Args:
            model: id of the model.
            layout: its slices.
        """
        with self._lock:
            sizes = [each.size_bytes for each in layout.slices]
            owners = assignment.assign(sizes, sorted(self._servers))
            placed = self._models[model] = _Placed(sizes, owners)
            self._owners_changed(placed)
            return self._places(placed)

    def registered(self, model: int) -> None:
        """Records that the transport has a placed model."""
        with self._lock:
            placed = self._models[model]
            placed.registered = True
            if placed.changed:
                self._transport.set_map(model, self._places(placed))

    def forget(self, model: int) -> None:
        """Forgets a removed model. Takes no lock: garbage collection may run while it is held."""
        self._models.pop(model, None)

    def _owners_changed(self, placed: _Placed) -> None:
        """Chooses replicas and creates a balancer for new owners."""
        if self._config.ps_replicas and len(self._servers) > 1:
            placed.replicas = assignment.replica_of(
                placed.owners, sorted(self._servers), placed.sizes, placed.replicas
            )
        else:
            placed.replicas = ()
        if self._config.ps_balance and placed.balancer is None:
            placed.balancer = Balancer(placed.owners, placed.sizes, self._servers)

    def _places(self, placed: _Placed) -> Places:
        replicas = placed.replicas or [-1] * len(placed.sizes)
        return list(zip(placed.owners.owner, replicas, strict=True))

    def _change(self, model: int, placed: _Placed, owners: assignment.Assignment) -> None:
        placed.owners = owners
        self._owners_changed(placed)
        placed.changed = True
        if placed.registered:
            self._transport.set_map(model, self._places(placed))

    # ---- speed --------------------------------------------------------------------------------

    def step_taken(self) -> None:
        """Reads the time that each server took in the last step.

        Moves slices if that helps, or requests or removes a server.
        """
        with self._lock:
            now_s = self._clock()
            step_s, self._last_step_s = now_s - self._last_step_s, now_s
            # With several models the figures do not show whose slices are slow.
            models = list(self._models.items())
            if len(models) != 1 or not self._config.ps_balance:
                return
            ((model, placed),) = models
            figures = {
                server: (size_bytes, busy_s)
                for server, size_bytes, busy_s in self._transport.take_figures()
                if size_bytes > 0 and server in self._servers
            }
            if placed.balancer is None or not figures:
                return
            change = placed.balancer.step(figures)
            if change is not None:
                _log.info(
                    "servers: %d slices move (%s)", len(change.moves), change.why.replace("_", " ")
                )
                self._change(model, placed, change.assignment)
            if self._scaling is not None and step_s > 0:  # nor NaN, as at the first
                longest_s = max(busy_s for _, busy_s in figures.values())
                self._scaling.step_taken(step_s, longest_s, placed.balancer, self._servers)

    # ---- servers join and leave ---------------------------------------------------------------

    def scale_by(self, requests: ScaleRequests) -> None:
        """Adds and removes servers by policy from now on, if the settings request it."""
        config = self._config
        if config.max_servers is None and config.min_servers is None:
            return
        least = config.min_servers or 1 + config.ps_replicas
        most = config.max_servers or len(self._servers)
        with self._lock:
            self._scaling = Scaling(ScalingPolicy(least, most), requests, self.remove)

    def server_joined(self, server: int) -> None:
        """Gives a server its share of slices, after it has connections to all other processes."""
        with self._lock:
            self._servers.add(server)
            _log.info("server %d has come", server)
            self._spread()
            if self._scaling is not None:
                self._scaling.server_joined(server)

    def _spread(self) -> None:
        for model, placed in list(self._models.items()):
            balancer = placed.balancer or Balancer(
                placed.owners, placed.sizes, set(placed.owners.owner)
            )
            change = balancer.with_servers(self._servers)
            if change is not None:
                self._change(model, placed, change.assignment)
            elif self._config.ps_replicas:
                self._change(model, placed, placed.owners)

    def lost(self, server: int, why: str) -> None:
        """Handles a lost server: the replica of each of its slices becomes owner and gets a new
        replica.
        """
        self._answers.lose(server, why)
        with self._lock:
            if server not in self._servers:
                return  # it has left, or is about to: then `remove` handles the loss
            self._servers.discard(server)
            if not self._config.ps_replicas or not self._servers:
                return  # the transport has failed and reports it
            _log.warning("server %d is gone (%s); its slices go to who has a copy", server, why)
            for model, placed in list(self._models.items()):
                owners = tuple(
                    replica if owner == server else owner
                    for owner, replica in zip(placed.owners.owner, placed.replicas, strict=True)
                )
                placed.balancer = None
                self._change(model, placed, placed.owners.changed_to(owners))

    def remove(self, server: int) -> None:
        """Removes a server after all its slices have moved.

        Raises:
            InvalidUsage: the server does not exist, or it is the last one, or one of the last two
                with replicas.
            TransferTimeout: its slices do not move in time.
            PeerLost: it was lost while it held slices. Training continues with replicas, and fails
                without.
        """
        with self._lock:
            if server not in self._servers:
                raise InvalidUsage(
                    f"there is no server {server}; there are {sorted(self._servers)}"
                )
            if len(self._servers) < 2 + self._config.ps_replicas:
                raise InvalidUsage(f"server {server} cannot go: too few would be left")
            self._servers.discard(server)
            self._spread()
        try:
            self._await_empty(server)
        except TransferTimeout:
            with self._lock:  # a later call may try again
                self._servers.add(server)
            raise
        except PeerLost as error:
            self._lost_while_leaving(server, error)
            return
        self._transport.send_control(server, messages.LEAVE)
        _log.info("server %d has left", server)

    def _await_empty(self, server: int) -> None:
        deadline = time.monotonic() + self._config.timeout.total_seconds()
        while time.monotonic() < deadline:
            self._answers.forget("audit", server)
            self._transport.send_control(server, messages.ask("audit"))
            held = self._answers.wait("audit", server)["held"]
            with self._lock:  # slices of removed models do not matter
                if not any(model in self._models for model, *_ in held):
                    return
            if self._closing.wait(_ASK_AGAIN_S):
                break
        raise TransferTimeout(
            f"server {server} still holds slices"
            + (" at the end of the job" if self._closing.is_set() else "")
        )

    def _lost_while_leaving(self, server: int, error: PeerLost) -> None:
        """Handles a server lost after its slices got new owners, which get their state from
        replicas.

        Raises:
            PeerLost: no server has the state of some slices. Training fails.
        """
        if self._config.ps_replicas:
            _log.warning("%s while it was leaving; its slices go to who has a copy", error)
            return
        deadline = time.monotonic() + _ARRIVE_S
        while missing := self._held_by_nobody():
            if time.monotonic() > deadline or self._closing.wait(_ASK_AGAIN_S):
                reason = (
                    f"{error} while it was leaving, and nobody has a copy of {missing} slices that "
                    "it held; HVD_ORDER_PS_REPLICAS=1 keeps one on another server"
                )
                # The transport follows the new map, so it does not notice the loss.
                self.fail(reason)
                raise PeerLost(reason)
        _log.warning("%s while it was leaving; it held nothing any more", error)

    def _held_by_nobody(self) -> int:
        """Returns the number of slices whose state no server has."""
        held = [entry for entries in self.audit().values() for entry in entries]
        missing = 0
        with self._lock:
            for model, placed in self._models.items():
                layout = max((entry[1] for entry in held if entry[0] == model), default=0)
                there = {entry[2] for entry in held if entry[:2] == [model, layout] and entry[3]}
                missing += len(placed.sizes) - len(there)
        return missing

    def close(self) -> None:
        """Stops deciding, and ends all waits for a server's answer."""
        self._closing.set()
        self._answers.close()
        if self._scaling is not None:
            self._scaling.close()
        self.fail = _log.error  # the engine is held by the transport, which holds this object

    def audit(self) -> dict[int, list[list[int]]]:
        """Returns what each server holds, as (model, layout, slice, owned, version, checksum)
        tuples.
        """
        with self._lock:
            servers = sorted(self._servers)
        for server in servers:
            self._answers.forget("audit", server)
            self._transport.send_control(server, messages.ask("audit"))
        return {server: self._answers.wait("audit", server)["held"] for server in servers}
