"""This rank's part in the agreement on the next collective, and in ``join()``.

Every rank sends its requests to rank 0; rank 0 keeps the table (name_order.py) and notifies all
ranks when a request is complete. That is one short message each way for a collective (some 0.1 ms
on one host), sent when the collective is submitted and not when its turn comes, so that the
messages of many asynchronous requests overlap.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from hvd_order.engine.job.job import Job
from hvd_order.engine.job.message_forms import FROM_RANK_0, TO_RANK_0, Message, check
from hvd_order.engine.job.messages import MessageStar
from hvd_order.engine.job.roll_call import RollCall
from hvd_order.engine.requests.name_order import NameOrder, Outgoing
from hvd_order.engine.requests.step_log import StepLogs

__all__: list[str] = []


class Listener(Protocol):
    """Takes the messages of one more purpose, in every job of this process.

    `heard` and `lost` run on the thread that takes all messages, and do not wait.
    """

    kinds: tuple[str, ...]
    """The kinds of messages (message_forms.py)."""

    def heard(self, ranks: Negotiation, sender: int, message: Message) -> None:
        """Handles a message."""

    def lost(self, rank: int) -> None:
        """A rank has left, or is lost; no message from it follows."""


_listeners: list[Listener] = []  # registered by modules when they are imported


def listen(listener: Listener) -> None:
    """Passes messages of the kinds of `listener` to it, in this job and in later ones."""
    _listeners.append(listener)


class Decided(Protocol):
    """A queue of collectives; none of its methods waits."""

    def decided(self, key: str, verdict: str, absent: list[int]) -> None:
        """Schedules a request: "go", "differ" or "refused" (see name_order.py)."""

    def late(self, key: str, lacking: list[int]) -> None:
        """Records the ranks that have not made a request for a while."""

    def failed(self, kind: str, text: str) -> None:
        """Fails the queue: it runs no more requests."""


class Negotiation:
    """The messages of one process in a job of several.

    Attributes:
        steps: step logs of this process's exchanges.
        events: messages to this rank while it has joined.
        heard_at: arrival of the last message, as ``time.monotonic()``.

    Thread safety: all methods may be called from any thread.
    """

    def __init__(self, job: Job) -> None:
        """Starts to receive messages; not collective."""
        self.steps = StepLogs()
        self.events: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.heard_at = time.monotonic()
        self._job = job
        self._forms = TO_RANK_0 if job.rank == 0 else FROM_RANK_0
        self._queues: dict[int, Decided] = {}
        self._star = MessageStar(job.messages_group, job.rank, job.size)
        self._roll_call = job.roll_call = RollCall(job.rank, job.size, self._star.send)
        self._closed = False
        # On rank 0 alone: the table, and the lock for it and for the order in which messages are
        # sent.
        self._lock = threading.Lock()
        config = job.config
        self._order = NameOrder(
            job.size, config.timeout.total_seconds(), config.stall_warning.total_seconds()
        )
        self._errands: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._watched_until = 0.0  # next time at which the watch looks by itself
        self._watch_thread: threading.Thread | None = None
        if job.rank == 0:
            self._watch_thread = threading.Thread(
                target=self._watch, name="hvd_order name order", daemon=True
            )
            self._watch_thread.start()
        self._star.start(self._on_message, self._on_lost)

    # ---- requests of this rank ----

    def add_set(self, number: int, ranks: Sequence[int], decided: Decided | None) -> None:
        """Adds a process set; rank 0 must learn of every one.

        Args:
            number: number of the set.
            ranks: its members.
            decided: its queue; None on a rank that is not a member.
        """
        if decided is not None:
            self._queues[number] = decided
        if self._job.rank == 0:
            with self._lock:
                self._send_all(self._order.add_set(number, ranks))

    def remove_set(self, number: int) -> None:
        """Removes a process set."""
        self._queues.pop(number, None)
        if self._job.rank == 0:
            with self._lock:
                self._order.remove_set(number)

    def send(self, message: Message) -> None:
        """Sends rank 0 a message: ["request", ...], ["join", ...] or ["step", ...]."""
        if self._job.rank == 0:
            self._handle(0, message)
        else:
            self._star.send(0, message)

    def tell(self, rank: int, message: Message) -> None:
        """Sends a message of a `Listener` from rank 0 to another rank."""
        self._star.send(rank, message)

    def close(self) -> None:
        """Notifies the other ranks that this rank leaves."""
        self._closed = True
        self._star.close()
        if self._watch_thread is not None:
            self._errands.put(None)
            self._watch_thread.join()

    # ---- messages to this rank ----

    def _on_message(self, sender: int, message: Message) -> None:
        check(message, self._forms, sender, self._job.size)
        if message[0] in ("roll", "here"):
            self._roll_call.received(message)
        elif listener := next((each for each in _listeners if message[0] in each.kinds), None):
            listener.heard(self, sender, message)
        elif self._job.rank == 0:
            self._handle(sender, message)
        elif message[0] == "leave":
            self._roll_call.gone(0)
            self._fail_all("PeerLost", _has_shut_down(0))
        else:
            self._take(message)

    def _on_lost(self, peer: int, reason: str) -> None:
        if self._closed:
            return
        for listener in _listeners:
            listener.lost(peer)
        self._roll_call.gone(peer)
        if self._job.rank == 0:
            with self._lock:
                self._send_all(self._order.gone(peer, "PeerLost", reason))
        else:
            self._fail_all("PeerLost", reason)

    def _fail_all(self, kind: str, text: str) -> None:
        for number in list(self._queues):
            self._take(["failed", number, kind, text])

    def _take(self, message: Message) -> None:
        """Handles a message of rank 0 to this rank."""
        self.heard_at = time.monotonic()
        what, *rest = message
        if what == "go":
            number, key, verdict, absent = rest
            if (decided := self._queues.get(number)) is not None:
                decided.decided(key, verdict, absent)
        elif what == "late":
            number, key, lacking = rest
            if (decided := self._queues.get(number)) is not None:
                decided.late(key, lacking)
        elif what == "failed":
            number, kind, text = rest
            if (decided := self._queues.get(number)) is not None:
                decided.failed(kind, text)
            if number == 0:
                self.events.put(message)
        elif what == "joined":
            _, counts = rest
            self.steps.start_reporting(counts, self.send)
        else:  # "step" and "all_joined"
            if what == "all_joined":
                self.steps.stop_reporting()
            self.events.put(message)

    # ---- rank 0's table ----

    def _handle(self, sender: int, message: Message) -> None:
        what, *rest = message
        with self._lock:
            if what == "request":
                number, name, digest, replaceable = rest
                out = self._order.requested(
                    sender, number, name, digest, replaceable, time.monotonic()
                )
                if not out and self._order.deadline_of_new(time.monotonic()) < self._watched_until:
                    self._errands.put(["look"])
            elif what == "step":
                out = self._order.step(message)
            elif what == "join":
                out = self._order.join(sender, *rest)
            else:  # "leave"
                for listener in _listeners:
                    listener.lost(sender)
                self._roll_call.gone(sender)
                out = self._order.gone(sender, "PeerLost", _has_shut_down(sender))
            self._send_all(out)

    def _send_all(self, out: Outgoing) -> None:
        """Sends to each rank in order. The caller holds the lock: all ranks receive the same
        order.

        Rank 0 is last: an error may end its program at once, and the other ranks must get the
        reason.
        """
        for rank, message in sorted(out, key=lambda each: each[0] == 0):
            if rank != 0:
                self._star.send(rank, message)
            elif message[0] in ("joined", "all_joined"):
                self._errands.put(message)  # reporting steps calls back and needs the lock
            else:
                self._take(message)

    def _watch(self) -> None:
        """Reports late requests; runs errands that must not run under the lock."""
        while True:
            with self._lock:
                self._watched_until = self._order.deadline()
            wait_s = max(0.0, self._watched_until - time.monotonic())
            try:
                errand = self._errands.get(timeout=None if math.isinf(wait_s) else wait_s)
            except queue.Empty:
                with self._lock:
                    self._send_all(self._order.overdue(time.monotonic()))
                continue
            if errand is None:
                return
            if errand[0] != "look":
                self._take(errand)


def _has_shut_down(rank: int) -> str:
    return f"rank {rank} has shut down; with fewer batches than others it calls hvd.join() first"
