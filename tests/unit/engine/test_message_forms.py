"""Messages between ranks are compared with their forms; what does not fit names its sender."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from hvd_order.base.errors import HorovodInternalError
from hvd_order.engine.job import group_collectives
from hvd_order.engine.job.message_forms import (
    FROM_RANK_0,
    TO_RANK_0,
    Malformed,
    check,
    malformed,
    parsed,
)
from hvd_order.engine.requests.name_order import NameOrder

RIGHT_TO_RANK_0: list[list[Any]] = [
    ["request", 0, "allreduce.x", "ab12", True],
    ["request", 0, "message 1 about optimizer 0/0", "ab12", None],
    ["join", {"0/0": 3, "1/a.weight and 2 more (ab).0": 0}, [["step", "0/0", 2, "end"]], {"0": 4}],
    ["step", "0/0", 7, "begin"],
    ["roll", 1, 5],
    ["here", 0, 5, 1, {"engine 0": 3}, [2]],
    ["clock", 123456789012345, True],
    ["trace", 0, 2, "eJw="],
    ["leave"],
]
RIGHT_FROM_RANK_0: list[list[Any]] = [
    ["go", 0, "noname.3", "differ", [1]],
    ["late", 0, "x", [2]],
    ["failed", 0, "PeerLost", "rank 2 is gone"],
    ["joined", 2, {"0/0": 3}],
    ["all_joined", 2, {"0": 4}],
    ["roll", 2, 5],
    ["here", 1, 5, 2, {}, []],
    ["clock"],
    ["trace", 123456789012345],
    ["leave"],
]


def test_what_ranks_send_is_taken() -> None:
    for message in RIGHT_TO_RANK_0:
        check(parsed(1, json.dumps(message).encode()), TO_RANK_0, 1, 3)
    for message in RIGHT_FROM_RANK_0:
        check(parsed(0, json.dumps(message).encode()), FROM_RANK_0, 0, 3)


@pytest.mark.parametrize("wrong", [-1, 10**30, 1.5, None, [], {}, True, "x" * 3, [[]], {"y": -1}])
def test_anything_else_in_a_place_is_refused(wrong: Any) -> None:
    refused = 0
    for right, forms, sender in (
        (RIGHT_TO_RANK_0, TO_RANK_0, 1),
        (RIGHT_FROM_RANK_0, FROM_RANK_0, 0),
    ):
        for message in right:
            for place in range(1, len(message)):
                other = [*message[:place], wrong, *message[place + 1 :]]
                test = forms[message[0]][place - 1]
                if test(wrong, 3):
                    continue  # a text, or an empty list, may be another one of its kind
                with pytest.raises(Malformed):
                    check(other, forms, sender, 3)
                refused += 1
    assert refused > 10


@pytest.mark.parametrize(
    "text", [b"", b"{", b"7", b"[]", b"[7]", b"\xff\xfe", b"[" * 100_000, b'{"go": 1}']
)
def test_what_is_no_message_is_refused(text: bytes) -> None:
    with pytest.raises(Malformed):
        parsed(1, text)


def test_nobody_speaks_for_another_rank() -> None:
    for message in (["roll", 2, 5], ["here", 0, 5, 2, {}, []], ["go", 0, "x", "go", []]):
        with pytest.raises(Malformed):
            check(message, TO_RANK_0, 1, 3)


def test_the_error_names_the_sender() -> None:
    assert "rank 4 sent a malformed message: too long" in str(malformed(4, "too long"))


def test_a_rank_joins_once() -> None:
    order = NameOrder(3, 10.0, 5.0)
    order.join(1, {}, [], {})
    with pytest.raises(Malformed):
        order.join(1, {}, [], {})


def test_what_is_gathered_is_compared_with_its_head() -> None:
    head = group_collectives.head_of(b"abc", "ids").tolist()
    assert group_collectives.count_in(head, 1, "ids") == 3
    for other, problem in (
        ([0, *head[1:]], "does not begin"),
        ([head[0], 0, head[2]], "about something else"),
        ([*head[:2], -1], "-1 bytes"),
        ([*head[:2], 13111190829925504], "13111190829925504 bytes"),
    ):
        with pytest.raises(HorovodInternalError, match=f"rank 1 sent a malformed .*{problem}"):
            group_collectives.count_in(other, 1, "ids")
    with pytest.raises(HorovodInternalError, match="rank 2 sent a malformed"):
        group_collectives.unpickled(b"no pickle", 2, "ids")
    assert torch.equal(torch.tensor(head), group_collectives.head_of(b"xyz", "ids"))
