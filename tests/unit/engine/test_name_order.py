"""Rank 0's table of collectives, without processes: who is told what, and when."""

from __future__ import annotations

import random

import pytest

from hvd_order.engine.job.message_forms import Message
from hvd_order.engine.requests.name_order import NameOrder, Outgoing, key_of


def table(size: int = 3) -> NameOrder:
    order = NameOrder(size, timeout_s=10.0, warning_s=1.0)
    order.add_set(0, range(size))
    return order


def ask(order: NameOrder, rank: int, name: str, now: float = 0.0, digest: str = "d") -> Outgoing:
    return order.requested(rank, 0, name, digest, True, now)


def test_a_request_runs_when_the_last_rank_has_made_it() -> None:
    order = table()
    assert ask(order, 2, "a") == []
    assert ask(order, 0, "b") == []
    assert ask(order, 0, "a") == []
    assert ask(order, 1, "a") == [(rank, ["go", 0, "a", "go", []]) for rank in range(3)]
    assert ask(order, 0, "a") == [], "the name may be used again"


def test_ranks_that_mean_different_things_are_told() -> None:
    order = table(2)
    ask(order, 0, "allreduce.noname.4", digest="one")
    assert key_of("allgather.noname.4") == "noname.4"
    about = "message 4 about optimizer 0/a.bias and 3 more (3c).0"
    assert key_of(f"{about}: waits for rank 1: x") == key_of(f"{about}: registers") == about
    out = ask(order, 1, "allgather.noname.4", digest="two")
    assert out == [(rank, ["go", 0, "noname.4", "differ", []]) for rank in range(2)]


@pytest.mark.parametrize("seed", range(30))
def test_all_ranks_hear_the_same_order_whatever_the_order_of_asking(seed: int) -> None:
    chance = random.Random(seed)
    size = chance.randint(1, 4)
    names = [f"n{i}" for i in range(8)]
    left = [chance.sample(names, len(names)) for _ in range(size)]
    order = table(size)
    heard: dict[int, list[Message]] = {rank: [] for rank in range(size)}
    while any(left):
        rank = chance.choice([rank for rank in range(size) if left[rank]])
        for to, message in ask(order, rank, left[rank].pop()):
            heard[to].append(message)
    assert sorted(message[2] for message in heard[0]) == names
    assert all(messages == heard[0] for messages in heard.values())


def test_a_missing_rank_is_named_first_in_a_warning_then_in_an_error() -> None:
    order = table()
    ask(order, 0, "allreduce.x", now=5.0)
    ask(order, 2, "allreduce.x", now=5.5)
    assert order.deadline() == 6.0
    assert order.overdue(5.9) == []
    assert order.overdue(6.0) == [(rank, ["late", 0, "allreduce.x", [1]]) for rank in (0, 2)]
    assert order.deadline() == 15.0
    out = order.overdue(15.0)
    assert sorted(rank for rank, _ in out) == [0, 1, 2]
    _, _, kind, text = out[0][1]
    assert kind == "TransferTimeout"
    assert text.startswith(
        "allreduce.x was not called on rank 1 within 10 s (HVD_ORDER_TIMEOUT) after ranks 0, 2 had"
    )
    assert ask(order, 1, "allreduce.x", now=20.0) == [(1, out[0][1])], "and stays so"


def test_a_rank_that_is_gone_fails_what_needs_it_and_nothing_else() -> None:
    order = table()
    order.add_set(1, [0, 2])
    ask(order, 0, "a")
    out = order.gone(1, "PeerLost", "rank 1 is gone")
    assert [rank for rank, _ in out] == [0, 1, 2]
    assert out[0][1] == ["failed", 0, "PeerLost", "rank 1 is gone"]
    order.requested(0, 1, "b", "d", True, 0.0)
    assert order.requested(2, 1, "b", "d", True, 0.0)[0][1][:4] == ["go", 1, "b", "go"]


def test_nobody_joins_where_a_rank_has_left() -> None:
    order = table(2)
    order.gone(1, "HorovodInternalError", "rank 1 has shut down")
    told = ["failed", 0, "HorovodInternalError", "rank 1 has shut down"]
    assert (0, told) in order.join(0, {}, [], {})


def test_a_set_may_be_heard_of_after_its_first_request() -> None:
    order = table(2)
    assert order.requested(1, 5, "a", "d", True, 0.0) == []
    assert order.add_set(5, [1]) == [(1, ["go", 5, "a", "go", []])]


def test_a_rank_that_has_joined_counts_as_having_asked() -> None:
    order = table()
    ask(order, 0, "a")
    assert order.join(1, {"0/0": 3}, [], {"0": 7}) == [
        (0, ["joined", 1, {"0/0": 3}]),
        (2, ["joined", 1, {"0/0": 3}]),
    ]
    assert ask(order, 2, "a") == [(rank, ["go", 0, "a", "go", [1]]) for rank in range(3)]
    order.requested(0, 0, "b", "d", False, 0.0)
    out = order.requested(2, 0, "b", "d", False, 0.0)
    assert out == [(rank, ["go", 0, "b", "refused", [1]]) for rank in (0, 2)]
    assert order.step(["step", "0/0", 3, "begin"]) == [(1, ["step", "0/0", 3, "begin"])]
    assert order.join(2, {}, [["step", "0/0", 4, "end"]], {"0": 9})[0] == (
        1, ["step", "0/0", 4, "end"],
    )  # fmt: skip
    out = order.join(0, {}, [], {})
    assert out[0] == (0, ["step", "0/0", 4, "end"]), "who joins late may be behind as well"
    assert out[-3:] == [(rank, ["all_joined", 0, {"0": 9}]) for rank in range(3)]
    assert ask(order, 0, "c") == [], "and then all are needed again"
