"""Messages between rank 0 and the others: order, length, the end; ranks 5 and 6 are far peers.

A rank that sends what is no message is named on every rank, and no thread ends by it.
"""

from __future__ import annotations

import queue
import threading
from typing import Any

import torch
from helpers.jobs import new_job, refused
from helpers.on_ranks import on_ranks
from helpers.ranks import RankFactory

import hvd_order.torch as hvd
from hvd_order.base.errors import HorovodInternalError
from hvd_order.engine.job.job import current
from hvd_order.engine.job.messages import MessageStar
from hvd_order.engine.requests.queues import negotiation

SIZE = 7
FAR = (5, 6)
COUNT = 40
LONG = 4_000_000  # characters: eight thousand frames
PATIENCE_S = 20.0


@on_ranks(SIZE)
def test_messages_arrive_in_order_whatever_their_length() -> None:
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


def body_sends_at_once() -> dict[int, int]:
    """The far peers send a long message each; returns how often rank 0 received each, as sent."""
    job = current()
    group = job.new_group("test_messages", "gloo", traffic="messages")
    star = MessageStar(group, job.rank, job.size)
    inbox: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
    star.start(lambda peer, m: inbox.put((peer, m)), lambda peer, e: inbox.put((peer, e)))
    hvd.barrier()
    received = dict.fromkeys(FAR, 0)
    if job.rank in FAR:
        star.send(0, ["test", job.rank, str(job.rank) * LONG])
    elif job.rank == 0:
        for _ in FAR:
            peer, message = inbox.get(timeout=PATIENCE_S)
            received[peer] += message == ["test", peer, str(peer) * LONG]
    hvd.barrier()
    star.close()
    job.drop_group(group)
    return received


def test_frames_of_far_peers_that_come_between_one_another(ranks: RankFactory) -> None:
    assert ranks(SIZE).run(body_sends_at_once)[0] == dict.fromkeys(FAR, 1)


# ---- what is no message -----------------------------------------------------------------------

WRONG = [b"{", b'["go"]', b'["request", 0, 7, "x", true]', b'["join", {}, [["step"]], {}]']


def body_sends(text: bytes) -> str:
    """Rank 1 sends the text; then both ranks ask for a collective."""
    with new_job({}):
        ends = negotiation()
        assert ends is not None
        if hvd.rank() == 1:
            ends._star._star.send(0, text)
        return refused(lambda: hvd.allreduce(torch.ones(1), name="x"), HorovodInternalError)


def test_a_malformed_message_names_its_sender_on_every_rank(ranks: RankFactory) -> None:
    for text in WRONG:
        for told in ranks(2).run(body_sends, text):
            assert "rank 1 sent a malformed message" in told, text
