"""Short messages between rank 0 and every other rank, separate from the data.

For collectives: rank 0 decides the order in which they run (name_order.py). Messages between two
ranks arrive in the order in which they were sent. The connections and their threads are native
(csrc/torch/c10d/text_star.h), as those of the engine's control channel.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable

import torch.distributed as dist

from hvd_order._native import _torch as native
from hvd_order.base.errors import PeerLost
from hvd_order.engine.job.message_forms import Malformed, Message, parsed

__all__ = ["MessageStar"]

_LEAVE: Message = ["leave"]
_PARTING_S = 1.0  # for the message that is being handled


class MessageStar:
    """This rank's end of the star; one thread takes the messages of all peers: on rank 0 every
    other rank, else rank 0.

    Thread safety: `send` may be called from any thread.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        """Prepares the star; ``group`` is a Gloo group of all ranks with no other user."""
        self._star = native.TextStar(group, rank, size)
        self._peers = range(1, size) if rank == 0 else range(1)
        self._gone: set[int] = set()  # peers that have left or are lost
        self._unheard: set[int] = set()  # peers that have sent what is no message
        self._thread: threading.Thread | None = None

    def start(
        self, on_message: Callable[[int, Message], None], on_lost: Callable[[int, str], None]
    ) -> None:
        """Starts to receive.

        Args:
            on_message: called with the sender and its message, on the star's thread; ["leave"] is
                the last message of a peer that shuts down. Raises Malformed if the message is none
                that the sender may send.
            on_lost: called with a peer that is lost (its connection broke, or it sends what is no
                message) and the reason, a sentence; no message from it follows.
        """
        self._star.start()
        self._thread = threading.Thread(
            target=self._receive, args=(on_message, on_lost), name="hvd_order messages", daemon=True
        )
        self._thread.start()

    def send(self, to: int, message: Message) -> None:
        """Posts a message and returns; ``on_lost`` reports the loss of the peer."""
        if to not in self._gone:
            with contextlib.suppress(PeerLost):
                self._star.send(to, json.dumps(message, separators=(",", ":")).encode())

    def close(self) -> None:
        """Tells all peers that this rank leaves; no message is received any more."""
        for peer in self._peers:
            self.send(peer, _LEAVE)
        self._star.close()
        if self._thread is not None:
            self._thread.join(_PARTING_S)

    def _receive(
        self, on_message: Callable[[int, Message], None], on_lost: Callable[[int, str], None]
    ) -> None:
        while (news := self._star.next()) is not None:
            peer, kind, text = news
            if peer in self._gone or peer in self._unheard:
                continue  # the connection of a peer that has left, or nothing that makes sense
            if kind == "lost":
                self._gone.add(peer)
                on_lost(peer, _lost(peer, text))
                continue
            try:
                if kind == "malformed":
                    raise Malformed(text.decode(errors="replace"))
                message = parsed(peer, text)
                if message == _LEAVE:
                    self._gone.add(peer)
                on_message(peer, message)
            except Malformed as error:
                self._unheard.add(peer)  # it is still told why
                on_lost(peer, str(error))


def _lost(peer: int, text: bytes) -> str:
    line = text.decode(errors="replace").strip().split("\n", maxsplit=1)[0]
    return f"rank {peer} is gone: its process died or its network connection broke ({line})"
