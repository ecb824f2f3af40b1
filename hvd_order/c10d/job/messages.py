"""Short messages between rank 0 and every other rank, separate from the data.

A star like the engine's control channel, but for collectives: rank 0 decides the order in which
they run (name_order.py). Messages between two ranks arrive in the order in which they were sent.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from hvd_order import _torch as native

__all__ = ["Message", "MessageStar"]

Message = list[Any]  # any JSON value; the first element is the kind of message

_FRAME_BYTES = 512  # nearly every message fits in one frame
_LENGTH_BYTES = 4
_TAG = 0
_FOREVER_S = 365 * 24 * 3600.0  # silence is not an error
_LEAVE: Message = ["leave"]
_PARTING_S = 1.0  # for farewells


class MessageStar:
    """This rank's end of the star: one thread for each peer, on rank 0 every other rank, else rank
    0.

    Both ends of a connection send a farewell, so that no thread is left in a receive, which Gloo
    cannot abort. A thread whose peer is frozen stays behind.

    Thread safety: `send` may be called from any thread.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        """Prepares the star; ``group`` is a Gloo group of all ranks with no other user."""
        self._group = group
        self._peers = range(1, size) if rank == 0 else range(1)
        self._locks = {peer: threading.Lock() for peer in self._peers}  # keeps a message whole
        self._said_goodbye: set[int] = set()
        self._posted: queue.SimpleQueue[dist.Work | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def start(
        self, on_message: Callable[[int, Message], None], on_lost: Callable[[int, str], None]
    ) -> None:
        """Starts to receive.

        Args:
            on_message: called with the sender and its message, on the peer's own thread; ["leave"]
                is the last message of a peer that shuts down.
            on_lost: called with a peer whose connection broke, and the reason; no message from it
                follows.
        """
        for peer in self._peers:
            self._start(self._listen, peer, on_message, on_lost)
        self._start(self._keep_posted)

    def send(self, to: int, message: Message) -> None:
        """Posts a message and returns; ``on_lost`` reports the loss of the peer."""
        text = json.dumps(message, separators=(",", ":")).encode()
        data = len(text).to_bytes(_LENGTH_BYTES, "little") + text
        with self._locks[to], contextlib.suppress(RuntimeError):
            if to in self._said_goodbye:
                return
            if message is _LEAVE:
                self._said_goodbye.add(to)
            self._post(to, data[:_FRAME_BYTES].ljust(_FRAME_BYTES, b"\0"))
            if len(data) > _FRAME_BYTES:
                self._post(to, data[_FRAME_BYTES:])

    def close(self) -> None:
        """Sends a farewell to all peers and waits a moment for theirs."""
        for peer in self._peers:
            self.send(peer, _LEAVE)
        deadline = time.monotonic() + _PARTING_S
        *listeners, keeper = self._threads
        for thread in listeners:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._posted.put(None)
        keeper.join(_PARTING_S)  # a limit of its own: it must not run when Python ends

    def _start(self, function: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(
            target=function, args=args, name="hvd_order messages", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _post(self, to: int, data: bytes) -> None:
        frame = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._posted.put(self._group.send([frame], to, _TAG))

    def _keep_posted(self) -> None:
        """Keeps posted messages alive until their peers have received them; only this thread
        waits.
        """
        while (work := self._posted.get()) is not None:
            with contextlib.suppress(RuntimeError):  # the peer is gone; its listener reports it
                native.wait_for(work, _FOREVER_S)

    def _listen(
        self,
        peer: int,
        on_message: Callable[[int, Message], None],
        on_lost: Callable[[int, str], None],
    ) -> None:
        try:
            while (message := self._receive(peer)) != _LEAVE:
                on_message(peer, message)
        except RuntimeError as error:
            on_lost(peer, str(error).strip().split("\n", maxsplit=1)[0])
            return
        on_message(peer, message)
        self.send(peer, _LEAVE)

    def _receive(self, peer: int) -> Message:
        data = self._receive_bytes(peer, _FRAME_BYTES)
        end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
        if end > _FRAME_BYTES:
            data += self._receive_bytes(peer, end - _FRAME_BYTES)
        message: Message = json.loads(data[_LENGTH_BYTES:end])
        return message

    def _receive_bytes(self, peer: int, count: int) -> bytes:
        frame = torch.empty(count, dtype=torch.uint8)
        native.wait_for(self._group.recv([frame], peer, _TAG), _FOREVER_S)
        return frame.numpy().tobytes()
