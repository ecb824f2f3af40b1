"""Messages between rank 0 and the others: order, length, the end; ranks 5 and 6 are far peers."""

from __future__ import annotations

import queue
import threading
from typing import Any

from helpers.ranks import RankFactory

from hvd_order.engine.job.job import current
from hvd_order.engine.job.messages import MessageStar

SIZE = 7
COUNT = 40
PATIENCE_S = 20.0


def talk() -> None:
    job = current()
    group = job.new_group("test_messages", "gloo", traffic="messages")
    before = threading.active_count()
    star = MessageStar(group, job.rank, job.size)
    inbox: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
    star.start(lambda peer, m: inbox.put((peer, m)), lambda peer, e: inbox.put((peer, e)))
    peers = range(1, job.size) if job.rank == 0 else range(1)
    lengths = [(7 * i * i) % 3001 for i in range(COUNT)]  # of one frame, and of several
    for i, length in enumerate(lengths):
        for peer in peers:
            star.send(peer, ["test", i, "x" * length])
    expected: list[Any] = [["test", i, "x" * length] for i, length in enumerate(lengths)]
    if job.rank == 0:
        expected.append(["leave"])
    received: dict[int, list[Any]] = {peer: [] for peer in peers}
    while any(len(messages) < len(expected) for messages in received.values()):
        peer, message = inbox.get(timeout=PATIENCE_S)
        received[peer].append(message)
    assert all(messages == expected for messages in received.values())
    star.close()
    star.send(peers[0], ["after the end"])
    assert threading.active_count() == before  # none is left in a receive
    # A message to a rank that has stopped receiving keeps Gloo's event loop busy until the end of
    # the group.
    job.drop_group(group)


def test_messages_arrive_in_order_whatever_their_length(ranks: RankFactory) -> None:
    ranks(SIZE).run(talk)
