"""Server starter: starts the parameter servers that worker 0 requests while the job runs.

Scale requests and answers are in the job's store, see servers/process/scale_requests.py. Only
requests of worker 0 are accepted: each is signed with the job's secret, for its own number.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from datetime import timedelta
from typing import Protocol

from hvd_order.base.errors import NotTrusted
from hvd_order.servers.access.secret import Store
from hvd_order.servers.access.signed_records import read_record, signed_record
from hvd_order.servers.access.ticket_queue import CountingStore, TicketQueue
from hvd_order.servers.launch.server_processes import ServerProcesses

__all__ = ["ServerStarter"]

_LOOK_S = 0.2
_PATIENCE = timedelta(seconds=60)  # for a request to appear under its number
_ROOM = "hvd_order/"  # prefix that processes of the job put before each key


class _JobStore(CountingStore, Store, Protocol):
    """What the starter calls of the job's store."""


class ServerStarter:
    """Answers scale requests on a thread of its own."""

    def __init__(self, store: _JobStore, key: bytes, servers: ServerProcesses, most: int) -> None:
        """Starts the thread.

        Args:
            store: a connection to the job's store that is used here only.
            key: the job's secret.
            servers: the job's servers.
            most: largest number of servers at a time.
        """
        self._store = store
        self._key = key
        self._servers = servers
        self._most = most
        self._started: dict[int, tuple[str, subprocess.Popen[bytes]]] = {}  # by request
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._look, name="server starter", daemon=True)
        self._thread.start()

    def _look(self) -> None:
        arrivals = TicketQueue(
            self._store,
            f"{_ROOM}scale_requests",
            lambda number: f"{_ROOM}scale_request/{number}",
            _PATIENCE,
            _say,
        )
        try:
            while not self._closing.wait(_LOOK_S):
                for number in arrivals.look():
                    self._fulfil(number)
                self._answer_about_ended()
        except RuntimeError as error:
            _say(f"no more servers will be started in this job: its store has failed: {error}")

    def _answer_about_ended(self) -> None:
        for number, (host, process) in list(self._started.items()):
            code = process.poll()
            if code is not None:
                del self._started[number]
                if code:
                    self._answer(number, failed=f"it ended on {host} with code {code}")

    def _fulfil(self, number: int) -> None:
        key = f"{_ROOM}scale_request/{number}"
        try:
            request = read_record(self._key, f"scale request {number}", bytes(self._store.get(key)))
        except NotTrusted as error:
            _say(f"a scale request is not followed: {error}")
            return
        if self._store.check([f"{key}/over"]):
            return
        if request.get("what") != "start":
            return self._answer(number, failed=f"the launcher cannot {request.get('what')!r}")
        if self._servers.running() >= self._most:
            return self._answer(
                number, failed=f"{self._most} run already, as --max-servers allows at most"
            )
        try:
            host, process = self._servers.start()
        except OSError as error:
            return self._answer(number, failed=str(error))
        self._started[number] = host, process
        self._answer(number, started=host)
        return None

    def _answer(self, number: int, **answer: str) -> None:
        if "failed" in answer:
            _say(f"no server could be started: {answer['failed']}")
        self._store.set(
            f"{_ROOM}scale_request/{number}/answer",
            signed_record(self._key, f"answer to scale request {number}", answer),
        )

    def close(self) -> None:
        """Stops the thread; no more servers are started."""
        self._closing.set()
        self._thread.join()


def _say(text: str) -> None:
    sys.stderr.write(f"hvd-order: {text}\n")
