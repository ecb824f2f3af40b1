"""A rank that sends what is no message is named on every rank, and no thread ends by it."""

from __future__ import annotations

import torch
from helpers.ranks import RankPool

import hvd_order.torch as hvd
from hvd_order.base.errors import HorovodInternalError
from hvd_order.engine.requests.queues import negotiation

WRONG = [b"{", b'["go"]', b'["request", 0, 7, "x", true]', b'["join", {}, [["step"]], {}]']


def body_sends(text: bytes) -> str:
    """Rank 1 sends the text; then both ranks ask for a collective."""
    hvd.shutdown()
    hvd.init()
    ends = negotiation()
    assert ends is not None
    if hvd.rank() == 1:
        ends._star._star.send(0, text)
    told = "nothing"
    try:
        hvd.allreduce(torch.ones(1), name="x")
    except HorovodInternalError as error:
        told = str(error)
    hvd.shutdown()
    return told


def test_a_malformed_message_names_its_sender_on_every_rank(two_ranks: RankPool) -> None:
    for text in WRONG:
        for told in two_ranks.run(body_sends, text):
            assert "rank 1 sent a malformed message" in told, text
