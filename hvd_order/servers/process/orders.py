"""Orders for a running job, such as ``hvd-order servers remove 2``, left signed in the store.

The signature covers the number of the order, so that no process can replay an order. The same
holds for the answer::

    orders               number of orders so far
    order/3              {"what": "remove", "server": 2}
    order/3/taken        the first process to add to it has the order: worker 0, or the sender
                         when it withdraws the order
    order/3/answer       {"done": "..."} or {"refused": why}; from worker 0
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from hvd_order.base.errors import HvdOrderError, InvalidUsage, NotTrusted, PeerLost, TransferTimeout
from hvd_order.base.store_errors import first_line
from hvd_order.servers.access.signed_records import read_record, signed_record
from hvd_order.servers.process.coordinator import Coordinator
from hvd_order.servers.process.scale_requests import ScaleRequests
from hvd_order.servers.worker.connections import LOOK_S, PARTING_S, MeetingPoint

__all__ = ["HEARD_WITHIN", "Orders", "answer_in", "await_answer", "give", "server_to_remove"]

HEARD_WITHIN = timedelta(seconds=10)  # worker 0 looks five times a second
_ANSWER_AGAIN_S = 0.1

_log = logging.getLogger("hvd_order")


# -------------------------------------------------------------------------- sender of an order


def give(meeting: MeetingPoint, key: bytes, order: dict[str, Any]) -> int:
    """Leaves an order for worker 0.

    Args:
        meeting: the job's store.
        key: the job's secret.
        order: the order.

    Returns:
        The number of the order.
    """
    number = meeting.count("orders")
    meeting.own().set(f"order/{number}", signed_record(key, f"order {number}", order))
    return number


def await_answer(
    meeting: MeetingPoint,
    key: bytes,
    number: int,
    timeout: timedelta,
    taken: Callable[[], None],
    heard_within: timedelta = HEARD_WITHIN,
) -> str:
    """Waits for worker 0's answer to an order.

    Args:
        meeting: the job's store.
        key: the job's secret.
        number: number of the order.
        timeout: longest time for worker 0 to carry it out.
        taken: called when worker 0 has taken the order but has not finished it.
        heard_within: longest time for worker 0 to take it; then it is withdrawn.

    Raises:
        InvalidUsage: worker 0 refuses; the message is its own.
        NotTrusted: the answer was signed with another secret.
        TransferTimeout: the order was not taken, or was not carried out in time.
        PeerLost: the job has ended.
    """
    try:
        return _await_answer(meeting, key, number, timeout, taken, heard_within)
    except RuntimeError as error:
        if isinstance(error, HvdOrderError):
            raise
        raise PeerLost(
            "the job was over before it answered: its store is gone (" + first_line(error) + ")"
        ) from error


def _await_answer(
    meeting: MeetingPoint,
    key: bytes,
    number: int,
    timeout: timedelta,
    taken: Callable[[], None],
    heard_within: timedelta,
) -> str:
    store = meeting.own()
    begin = time.monotonic()
    heard = False
    while not store.check([f"order/{number}/answer"]):
        waited_s = time.monotonic() - begin
        if not heard and store.check([f"order/{number}/taken"]):
            heard = True
            taken()
        elif not heard and waited_s >= heard_within.total_seconds():
            if store.add(f"order/{number}/taken", 1) == 1:
                raise TransferTimeout(
                    f"nobody has looked at the order within {heard_within.total_seconds():g} s, so "
                    f"it is withdrawn: no worker 0 is at the store at {meeting.host}:"
                    f"{meeting.port}. Is the job still starting, stuck, or over?"
                )
        elif waited_s >= timeout.total_seconds():
            raise TransferTimeout(
                f"worker 0 has the order and has not carried it out within "
                f"{timeout.total_seconds():g} s (HVD_ORDER_TIMEOUT); its log says more"
            )
        time.sleep(_ANSWER_AGAIN_S)
    return answer_in(bytes(store.get(f"order/{number}/answer")), key, number)


def answer_in(note: bytes, key: bytes, number: int) -> str:
    """Returns the content of the answer to an order.

    Raises:
        InvalidUsage, NotTrusted: as in `await_answer`.
    """
    try:
        answer = read_record(key, f"answer to order {number}", note)
    except NotTrusted as error:
        raise NotTrusted(
            f"{error}: the job has another secret than this command (HVD_ORDER_SECRET, "
            "HVD_ORDER_SECRET_FILE), or a stranger has answered"
        ) from None
    done = "done" in answer
    # JSON may hold lone surrogates, which a terminal cannot print.
    text = str(answer.get("done" if done else "refused"))
    text = text.encode(errors="backslashreplace").decode()
    if done:
        return text
    raise InvalidUsage(text)


# ----------------------------------------------------------------------------------- worker 0


class Orders:
    """Passes orders from the store to the coordinator, one after the other.

    It also gives the coordinator access to the store for its own scale requests.
    """

    def __init__(self, meeting: MeetingPoint, key: bytes, coordinator: Coordinator) -> None:
        """Starts to look for orders."""
        self._meeting = meeting
        self._key = key
        self._coordinator = coordinator
        coordinator.scale_by(ScaleRequests(meeting, key))
        self._closing = threading.Event()
        self._taken: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        # Two threads, so that an order is marked as taken while another one is carried out.
        self._threads = [
            threading.Thread(target=self._look, name="orders", daemon=True),
            threading.Thread(target=self._work, name="orders at work", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _look(self) -> None:
        try:
            store = self._meeting.own()
            arrivals = self._meeting.tickets("orders", lambda number: f"order/{number}")
            while not self._closing.is_set():
                for number in arrivals.look():
                    note = bytes(store.get(f"order/{number}"))
                    if store.add(f"order/{number}/taken", 1) == 1:
                        self._taken.put((number, note))
                self._closing.wait(LOOK_S)
        except RuntimeError:
            pass  # the job has ended
        self._taken.put(None)

    def _work(self) -> None:
        while (taken := self._taken.get()) is not None:
            number, note = taken
            answer = self._carry_out(number, note)
            try:
                self._meeting.own().set(
                    f"order/{number}/answer",
                    signed_record(self._key, f"answer to order {number}", answer),
                )
            except RuntimeError:
                return  # the job has ended

    def _carry_out(self, number: int, note: bytes) -> dict[str, str]:
        try:
            if self._closing.is_set():
                raise PeerLost("the job is over")
            server = server_to_remove(read_record(self._key, f"order {number}", note))
            self._coordinator.remove(server)
        except HvdOrderError as error:
            _log.warning("servers: order %d is not carried out: %s", number, error)
            return {"refused": str(error)}
        return {"done": f"server {server} has left"}

    def close(self) -> None:
        """Stops looking for orders."""
        self._closing.set()
        self._coordinator.close()
        for thread in self._threads:
            thread.join(PARTING_S)


def server_to_remove(order: dict[str, Any]) -> int:
    """Returns the server to remove; removal is the only order so far.

    Raises:
        InvalidUsage: the order is something else.
    """
    what, server = order.get("what"), order.get("server")
    if what != "remove":
        raise InvalidUsage(f"nobody knows how to {what!r}")
    if type(server) is not int:  # nor a bool
        raise InvalidUsage(f"{server!r} is no number of a server")
    return server
