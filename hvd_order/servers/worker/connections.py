"""Connections of a worker, a server or a tool to a server.

Both sides meet in the job's store. A server announces itself under its number. A process that
wants a connection draws the next number of the server's ticket queue, and both sides prove that
they have the secret before either opens a connection::

    servers                number of servers so far
    server/3               address of server 3, which listens
    server/3/places        number of processes that have asked for a connection to it
    server/3/place/7/...   proofs of the process with number 7 (servers/access/secret.py)
    server/3/pair/7/...    Gloo's own keys for that pair, signed (signed_store.py)
    server/3/ready         all workers and all earlier servers have their connections
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from hvd_order._native import _torch as native
from hvd_order.base.bounded import answer_s, within
from hvd_order.base.errors import HvdOrderError, InvalidUsage, NotTrusted, PeerLost, TransferTimeout
from hvd_order.base.store_errors import first_line
from hvd_order.engine.job.gloo import gloo_group, open_devices
from hvd_order.launch.listening import listening_fd
from hvd_order.servers.access import secret
from hvd_order.servers.access.ticket_queue import TicketQueue
from hvd_order.servers.process.signed_store import SignedStore

__all__: list[str] = []

_log = logging.getLogger("hvd_order")

LARGEST_PAYLOAD_BYTES = 64 * 2**20
_HANDSHAKE_TIME = timedelta(seconds=30)
LOOK_S = 0.2  # between two looks for new processes
PARTING_S = 5.0  # for a thread that may wait for a stopped store; the thread then stays behind
_TRY_S = 5.0  # for a connection attempt; a host that drops packets sends no error
_TRY_AGAIN_S = 0.2


class MeetingPoint:
    """The job's store, as one process uses it.

    Thread safety: every method opens a connection of its own where it waits.
    """

    def __init__(
        self,
        address: str,
        timeout: timedelta,
        listen: bool = False,
        patience: timedelta = timedelta(0),
        waiting: Callable[[str], None] = _log.warning,
    ) -> None:
        """Connects.

        Args:
            address: "host:port".
            timeout: longest wait for a key of the store.
            listen: be the store that the other processes connect to.
            patience: longest wait for the store to listen; 0: one attempt.
            waiting: called with a line for the log before a wait.

        Raises:
            InvalidUsage: the address is invalid.
            PeerLost: nothing listens there, or the listener is not a store.
        """
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise InvalidUsage(f"HVD_ORDER_SERVER_STORE is {address!r}; expected host:port")
        self.host, self.port = host, int(port)
        self._timeout = timeout
        self._listens = listen
        if listen:
            self._store = self._connect(listen)
            self.port = self._store.port
        else:
            self._await_listener(patience, waiting)
            self._store = self._greet()

    def _await_listener(self, patience: timedelta, waiting: Callable[[str], None]) -> None:
        # PyTorch's own attempts can be bounded only together with all later waits.
        deadline = time.monotonic() + patience.total_seconds()
        said = False
        while True:
            try:
                socket.create_connection((self.host, self.port), _TRY_S).close()
                return
            except OSError as error:
                if time.monotonic() >= deadline:
                    after = f" within {patience.total_seconds():g} s" if patience else ""
                    raise self._unreachable(
                        f"nobody listens there{after}: {error.strerror or error}"
                    ) from error
                if not said:
                    said = True
                    waiting(
                        f"nobody listens at {self.host}:{self.port} yet, where the store of the "
                        f"parameter servers should be; waiting up to {patience.total_seconds():g} s"
                    )
                time.sleep(_TRY_AGAIN_S)

    def _unreachable(self, why: str) -> PeerLost:
        return PeerLost(
            f"the store of the parameter servers at {self.host}:{self.port} cannot be reached: "
            f"{why}. It is in hvd-order run, or in the server that was started with --listen: is "
            "the job running, and is this its HVD_ORDER_SERVER_STORE (--store)?"
        )

    def _greet(self) -> TCPStore:
        # PyTorch waits without limit for the greeting of a listener that is not a store.
        greeting_s = answer_s(self._timeout)
        try:
            return within(greeting_s, self._connect)
        except TimeoutError:
            raise self._unreachable(
                f"what listens there has not answered as a store within {greeting_s:g} s"
            ) from None

    def _connect(self, listen: bool = False) -> TCPStore:
        greeting = timedelta(seconds=answer_s(self._timeout))
        try:
            store = TCPStore(
                self.host,
                self.port,
                None,
                listen,
                greeting,
                wait_for_workers=False,
                master_listen_fd=listening_fd(self.host, self.port) if listen else None,
            )
        except (dist.DistError, RuntimeError) as error:
            if listen:
                raise PeerLost(
                    f"the store of the parameter servers cannot listen at {self.host}:{self.port}: "
                    f"{first_line(error)}"
                ) from error
            raise self._unreachable(first_line(error)) from error
        store.set_timeout(self._timeout)
        return store

    def own(self) -> PrefixStore:
        """Opens a connection for one thread.

        Raises:
            PeerLost: the store is gone.
        """
        self._await_listener(timedelta(0), _log.warning)  # PyTorch would retry until its timeout
        return PrefixStore("hvd_order", self._greet())

    def count(self, key: str) -> int:
        """Increments a counter and returns its previous value.

        Raises:
            PeerLost: the store is gone, or does not answer.
        """
        store = PrefixStore("hvd_order", self._store)
        try:
            return int(within(answer_s(self._timeout), lambda: store.add(key, 1))) - 1
        except (TimeoutError, RuntimeError) as error:
            raise self._unreachable(first_line(error)) from error

    def tickets(
        self,
        counter: str,
        key: Callable[[int], str],
        first: int = 0,
        given_up: Callable[[str], None] = _log.warning,
    ) -> TicketQueue:
        """Returns a queue of the processes that draw numbers from a counter, for use by one
        thread.

        Args:
            counter: key of the counter, as for `count`.
            key: returns the key that the holder of a number fills.
            first: first number to look at.
            given_up: called with a line for the log about a number whose key stays empty.
        """
        return TicketQueue(self.own(), counter, key, self._timeout, given_up, first)


def host_name() -> str:
    """Returns this host's own name."""
    return socket.gethostname()


def take_part(
    meeting: MeetingPoint, key: bytes, me: str, server: int, timeout: timedelta
) -> native.PairConnection:
    """Connects to a server that has announced itself.

    Args:
        meeting: the job's store.
        key: the job's secret.
        me: "worker 2", "server 0" or "observer 1".
        server: number of the server.
        timeout: longest wait for the server.

    Raises:
        NotTrusted: one side does not have the secret.
        TransferTimeout: the server does not answer.
        PeerLost: the connection could not be made.
    """
    place = meeting.count(f"server/{server}/places")
    store = meeting.own()
    keys = secret.join(
        store,
        f"server/{server}/place/{place}",
        key,
        peer=me,
        server=f"server {server}",
        timeout=timeout,
    )
    return _link(store, server, place, 1, keys, timeout)


def _link(
    store: PrefixStore,
    server: int,
    place: int,
    rank: int,
    keys: secret.ConnectionKeys,
    timeout: timedelta,
) -> native.PairConnection:
    pair = SignedStore(PrefixStore(f"server/{server}/pair/{place}", store), keys.records)
    try:
        # A device of its own: the data of one server must not wait for those of another.
        group = gloo_group(pair, rank, 2, timeout, "messages", open_devices())
    except NotTrusted:
        raise
    except RuntimeError as error:
        raise PeerLost(
            f"no connection to server {server} could be made: {first_line(error)}"
        ) from error
    return native.PairConnection(group, keys.sends, keys.receives, LARGEST_PAYLOAD_BYTES)


class Door:
    """Accepts every process that proves that it has the secret, each on a thread of its own."""

    def __init__(
        self,
        meeting: MeetingPoint,
        key: bytes,
        server: int,
        welcome: Callable[[str, native.PairConnection], None],
        refuse: Callable[[str], None],
    ) -> None:
        """Starts to accept connections.

        Args:
            meeting: the job's store.
            key: the job's secret.
            server: this server's number.
            welcome: called with each new connection's peer name and the connection.
            refuse: called with a line for the log.
        """
        self._meeting = meeting
        self._key = key
        self._server = server
        self._welcome = welcome
        self._refuse = refuse
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._open, name="door", daemon=True)
        self._thread.start()

    def _open(self) -> None:
        line = f"server/{self._server}"
        tickets = self._meeting.tickets(
            f"{line}/places", lambda place: f"{line}/place/{place}/hello", given_up=self._refuse
        )
        while not self._closing.is_set():
            try:
                places = tickets.look()
            except RuntimeError:
                return  # the job has ended
            for place in places:
                threading.Thread(
                    target=self._let_in, args=(place,), name=f"door {place}", daemon=True
                ).start()
            self._closing.wait(LOOK_S)

    def _let_in(self, place: int) -> None:
        try:
            store = self._meeting.own()
            peer = secret.accept(
                store,
                f"server/{self._server}/place/{place}",
                self._key,
                server=f"server {self._server}",
                timeout=_HANDSHAKE_TIME,
            )
            if peer is not None:
                link = _link(store, self._server, place, 0, peer.keys, _HANDSHAKE_TIME)
                self._welcome(peer.identity, link)
        except (HvdOrderError, RuntimeError) as error:
            self._refuse(f"place {place}: {error}")

    def close(self) -> None:
        """Stops accepting connections."""
        self._closing.set()
        self._thread.join(PARTING_S)


class Lookout:
    """Detects new servers."""

    def __init__(self, meeting: MeetingPoint, first: int, joined: Callable[[int], None]) -> None:
        """Starts to look for servers from number ``first`` on.

        Args:
            meeting: the job's store.
            first: number of the first server to look for.
            joined: called with each new server, on this object's thread.
        """
        self._meeting = meeting
        self._first = first
        self._server_joined = joined
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._look, name="lookout", daemon=True)
        self._thread.start()

    def _look(self) -> None:
        tickets = self._meeting.tickets("servers", lambda server: f"server/{server}", self._first)
        while not self._closing.is_set():
            try:
                servers = tickets.look()
            except RuntimeError:
                return  # the job has ended
            for server in servers:
                self._server_joined(server)
            self._closing.wait(LOOK_S)

    def close(self) -> None:
        """Stops looking for servers."""
        self._closing.set()
        self._thread.join(PARTING_S)


def wait_for(store: PrefixStore, key: str, timeout: timedelta, complaint: str) -> bytes:
    """Waits for a key and returns its value.

    Raises:
        TransferTimeout: the key has no value in time; the message starts with the complaint.
    """
    try:
        limit_s = timeout.total_seconds() + answer_s(timeout)
        within(limit_s, lambda: store.wait([key], timeout))
        return bytes(store.get(key))
    except (TimeoutError, RuntimeError) as error:
        raise TransferTimeout(
            f"{complaint} within {timeout.total_seconds():g} s ({type(error).__name__})"
        ) from error
