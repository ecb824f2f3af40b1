"""What workers, servers and tools tell each other in words: JSON over the links."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from hvd_order.errors import PeerLost, TransferTimeout

__all__: list[str] = []


def ready(servers: Iterable[int]) -> str:
    """A worker has told a server of all models; the job has these servers."""
    return json.dumps({"what": "ready", "servers": list(servers)})


def ask(what: str) -> str:
    """Wants an answer of the same name: "audit" or "late"."""
    return json.dumps({"what": what})


LEAVE = json.dumps({"what": "leave"})
"""To a server: it holds nothing any more and may go."""


class Answers:
    """Answers of servers, until somebody asks for them."""

    def __init__(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()
        self._changed = threading.Condition()  # guards what follows
        self._answers: dict[tuple[str, int], Any] = {}
        self._lost: dict[int, str] = {}
        self._closed = False

    def take(self, server: int, text: str) -> None:
        """A server has said something; on the link's thread."""
        message = json.loads(text)
        with self._changed:
            self._answers[message["what"], server] = message
            self._changed.notify_all()

    def lose(self, server: int, why: str) -> None:
        """A server is gone: it answers no more."""
        with self._changed:
            self._lost[server] = why
            self._changed.notify_all()

    def close(self) -> None:
        """Nobody need wait any more: the job is over."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def forget(self, what: str, server: int) -> None:
        """Drops an answer to an earlier question."""
        with self._changed:
            self._answers.pop((what, server), None)

    def wait(self, what: str, server: int) -> Any:
        """The answer of a server.

        Raises:
            PeerLost: the server is gone.
            TransferTimeout: the answer does not come, or the job is over.
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
