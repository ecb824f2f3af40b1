"""Scale requests: worker 0 asks the launcher for one more server.

Requests and their answers lie in the store, signed as orders are::

    scale_requests           number of requests so far
    scale_request/3          {"what": "start"}
    scale_request/3/answer   {"started": "host b"} or {"failed": why}; from the launcher
    scale_request/3/over     the request has ended

hvd_order/servers/launch/server_starter.py has the other end.
"""

from __future__ import annotations

import queue
import threading
import time
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore

from hvd_order.base.errors import HvdOrderError, NotTrusted, PeerLost, TransferTimeout
from hvd_order.base.store_errors import first_line
from hvd_order.servers.access.signed_records import read_record, signed_record
from hvd_order.servers.worker.connections import LOOK_S, MeetingPoint

__all__ = ["ScaleRequests"]

_PATIENCE = timedelta(seconds=120)  # until a process on another host has loaded PyTorch


class ScaleRequests:
    """Worker 0's end of scale requests."""

    def __init__(self, meeting: MeetingPoint, key: bytes, patience: timedelta = _PATIENCE) -> None:
        """Creates the end without a request.

        Args:
            meeting: the job's store.
            key: the job's secret.
            patience: longest wait for a server.
        """
        self._meeting = meeting
        self._key = key
        self._patience_s = patience.total_seconds()

    def request_server(self, come: queue.SimpleQueue[int], closing: threading.Event) -> int:
        """Requests a server and waits for it.

        Args:
            come: queue of the servers that join from now on.
            closing: ends the wait.

        Returns:
            The number of the server that joined.

        Raises:
            HvdOrderError: the launcher could not start one.
            TransferTimeout: the request was not answered, or the server did not join.
            PeerLost: the job has ended.
        """
        try:
            return self._request_server(come, closing)
        except RuntimeError as error:
            if isinstance(error, HvdOrderError):
                raise
            raise PeerLost(
                f"the store of the parameter servers is gone: {first_line(error)}"
            ) from error

    def _request_server(self, come: queue.SimpleQueue[int], closing: threading.Event) -> int:
        number = self._meeting.count("scale_requests")
        store = self._meeting.own()
        request = signed_record(self._key, f"scale request {number}", {"what": "start"})
        store.set(f"scale_request/{number}", request)
        deadline = time.monotonic() + self._patience_s
        answer: dict[str, Any] | None = None
        try:
            while time.monotonic() < deadline and not closing.is_set():
                try:
                    return come.get(timeout=LOOK_S)
                except queue.Empty:
                    answer = self._answer(store, number)
                if answer is not None and "failed" in answer:
                    raise HvdOrderError(f"the launcher could not start it: {answer['failed']}")
        finally:
            store.set(f"scale_request/{number}/over", "1")
        if closing.is_set():
            raise PeerLost("the job is over")
        if answer is None:
            raise TransferTimeout(
                f"nobody has answered within {self._patience_s:g} s; only hvd-order run with "
                "--max-servers starts servers by itself"
            )
        raise TransferTimeout(
            f"it was started on {answer.get('started')} and has not come within "
            f"{self._patience_s:g} s; what it said stands in the launcher's output"
        )

    def _answer(self, store: PrefixStore, number: int) -> dict[str, Any] | None:
        """Returns the newest answer; None if there is none signed by the launcher."""
        key = f"scale_request/{number}/answer"
        if not store.check([key]):
            return None
        try:
            subject = f"answer to scale request {number}"
            return read_record(self._key, subject, bytes(store.get(key)))
        except NotTrusted:
            return None
