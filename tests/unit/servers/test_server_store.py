"""What lies in the job's store, where anybody can write: numbers that come, and signed notes."""

from __future__ import annotations

from datetime import timedelta

import pytest

from hvd_order.base.errors import NotTrusted
from hvd_order.servers.access.signed_records import read_record, signed_record
from hvd_order.servers.access.ticket_queue import TicketQueue

KEY = b"the secret of this job.........."


class FakeStore:
    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.keys: set[str] = set()

    def add(self, key: str, value: int) -> int:
        self.numbers[key] = self.numbers.get(key, 0) + value
        return self.numbers[key]

    def check(self, keys: list[str]) -> bool:
        return set(keys) <= self.keys


class World:
    """TicketQueue at a counter, with a clock."""

    def __init__(self, first: int = 0) -> None:
        self.store = FakeStore()
        self.now_s = 0.0
        self.said: list[str] = []
        self.arrivals = TicketQueue(
            self.store, "places", lambda place: f"place/{place}", timedelta(seconds=10),
            self.said.append, first, clock=lambda: self.now_s,
        )  # fmt: skip

    def take(self, fill: bool = True) -> int:
        number = self.store.add("places", 1) - 1
        if fill:
            self.store.keys.add(f"place/{number}")
        return number


def test_each_arrival_is_seen_once() -> None:
    world = World()
    assert world.arrivals.look() == []
    world.take()
    world.take()
    assert world.arrivals.look() == [0, 1]
    assert world.arrivals.look() == []
    world.take()
    assert world.arrivals.look() == [2]
    assert world.said == []


def test_arrivals_before_the_first_are_not_looked_at() -> None:
    world = World(first=2)
    for _ in range(3):
        world.take()
    assert world.arrivals.look() == [2]


def test_a_number_that_nobody_fills_holds_nobody_up() -> None:
    world = World()
    gap = world.take(fill=False)
    world.take()
    assert world.arrivals.look() == [1]
    world.now_s = 9.0
    world.store.keys.add(f"place/{gap}")  # it was slow
    assert world.arrivals.look() == [gap]
    world.take(fill=False)
    world.arrivals.look()
    world.now_s = 20.0
    assert world.arrivals.look() == []
    assert len(world.said) == 1
    assert "place/2 is left out" in world.said[0]
    assert "within 10 s" in world.said[0]
    world.store.keys.add("place/2")
    world.take()
    assert world.arrivals.look() == [3], "too late is too late"


def test_a_stranger_who_takes_all_numbers_keeps_nobody_out() -> None:
    world = World()
    world.store.add("places", 2**40)
    world.take()
    assert world.arrivals.look() == [2**40]
    assert len(world.said) == 1
    for _ in range(300):
        world.take(fill=False)
    world.take()
    assert world.arrivals.look() == [2**40 + 301]
    for _ in range(250):
        world.take(fill=False)
        world.arrivals.look()
    world.take()
    assert world.arrivals.look() == [2**40 + 552]


def test_a_note_says_what_was_written() -> None:
    note = signed_record(KEY, "scale request 3", {"what": "start"}).encode()
    assert read_record(KEY, "scale request 3", note) == {"what": "start"}


@pytest.mark.parametrize(
    "note",
    [
        signed_record(b"another secret", "scale request 3", {"what": "start"}).encode(),
        signed_record(KEY, "scale request 4", {"what": "start"}).encode(),
        signed_record(KEY, "scale request 3", {"what": "start"}).replace("start", "stop!").encode(),
        b"", b"[" * 100_000, b"{}", b'["{}", 3]', b"\xff", b'["{}", "\xc3\xa9"]', b"[1, 2, 3]",
    ],
)  # fmt: skip
def test_a_note_of_somebody_else_is_not_believed(note: bytes) -> None:
    with pytest.raises(NotTrusted, match="scale request 3"):
        read_record(KEY, "scale request 3", note)
