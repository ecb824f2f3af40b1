"""Control messages between workers, servers and tools: JSON over the connections."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from hvd_order.base.errors import PeerLost, TransferTimeout

__all__: list[str] = []


def ready(servers: Iterable[int]) -> str:
    """Says that a worker has sent a server all models, and names the servers of the job."""
    return json.dumps({"what": "ready", "servers": list(servers)})


def ask(what: str) -> str:
    """Requests an answer of the same name: "audit", "late" or "times"."""
    return json.dumps({"what": what})


RECORD = json.dumps({"what": "record"})
"""Tells a server to record the times of its work, until it is asked for "times"."""

LEAVE = json.dumps({"what": "leave"})
"""Tells a server that it holds no slices and may leave."""


class ServerAnswers:
    """Stores answers of servers until they are requested."""

    def __init__(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()
        self._changed = threading.Condition()  # guards the fields below
        self._answers: dict[tuple[str, int], Any] = {}
        self._lost: dict[int, str] = {}
        self._closed = False

    def take(self, server: int, text: str) -> None:
        """Stores a server's message; runs on the connection's thread."""
        message = json.loads(text)
        with self._changed:
            self._answers[message["what"], server] = message
            self._changed.notify_all()

    def lose(self, server: int, why: str) -> None:
        """Records that a server is gone and sends no more answers."""
        with self._changed:
            self._lost[server] = why
            self._changed.notify_all()

    def close(self) -> None:
        """Ends all waits: the job has ended."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def forget(self, what: str, server: int) -> None:
        """Drops the answer to an earlier question."""
        with self._changed:
            self._answers.pop((what, server), None)

    def wait(self, what: str, server: int) -> Any:
        """Waits for the answer of a server.

        Raises:
            PeerLost: the server is gone.
            TransferTimeout: the answer does not arrive, or the job has ended.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or server in self._lost or (what, server) in self._answers,
                self._timeout_s,
            )
            if (what, server) in self._answers:
                return self._answers.pop((what, server))
            if server in self._lost:
                raise PeerLost(f"server {server} is gone ({self._lost[server]})")
            within = "before the job was over" if self._closed else f"within {self._timeout_s:g} s"
            raise TransferTimeout(f"server {server} has not answered '{what}' {within}")
