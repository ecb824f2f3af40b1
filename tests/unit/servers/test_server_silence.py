"""When a server that gives no sign of life counts as lost."""

from __future__ import annotations

from datetime import timedelta

from hvd_order.base.config import Config
from hvd_order.servers.access.silence import Silence
from hvd_order.servers.process.heartbeat import longest_silence


class World:
    """Looks once a second; ten seconds are too long."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.silence = Silence(timedelta(seconds=10), 1.0, clock=lambda: self.now_s)
        self.signs = {0: 0, 1: 0}

    def look(self, *living: int, waits: bool = True, after_s: float = 1.0) -> list[int]:
        self.now_s += after_s
        for server in living:
            self.signs[server] += 1
        return self.silence.look(waits, self.signs)


def test_a_lost_server_is_found_before_waits_end() -> None:
    def longest_s(timeout_s: float, silence_s: float) -> float:
        config = Config(
            timeout=timedelta(seconds=timeout_s), ps_silence=timedelta(seconds=silence_s)
        )
        return longest_silence(config).total_seconds()

    assert longest_s(60, 10) == 10
    assert longest_s(8, 10) == 4


def test_only_who_is_silent_for_long_is_lost() -> None:
    world = World()
    assert world.look(0, 1) == []
    for _ in range(9):
        assert world.look(1) == []
    assert world.look(1) == [0]


def test_any_sign_begins_anew() -> None:
    world = World()
    for _ in range(5):
        world.look(0, 1)
        for _ in range(9):
            assert world.look() == []
    assert world.look() == [0, 1]


def test_nobody_is_lost_while_nobody_waits() -> None:
    world = World()
    world.look(0, 1)
    for _ in range(100):
        assert world.look(waits=False) == []
    for _ in range(9):
        assert world.look() == [], "it counts from when somebody waits"
    assert world.look() == [0, 1]


def test_a_pause_of_this_process_is_no_silence_of_others() -> None:
    world = World()
    world.look(0, 1)
    for _ in range(4):  # stopped for a minute each, with all the others
        assert world.look(after_s=60.0) == []
    world.look(0, after_s=60.0)
    assert world.look(0, after_s=60.0) == [1], "but not for ever"


def test_who_is_lost_in_turn_is_lost_together() -> None:
    world = World()
    world.look(0, 1)
    for _ in range(6):
        world.look(1)
    for _ in range(9):
        assert world.look() == [], "server 1 may be lost too, and is to take over from nobody"
    assert world.look() == [0, 1]


def test_doubts_about_another_end() -> None:
    world = World()
    world.look(0, 1)
    for _ in range(6):
        world.look(1)
    for _ in range(7):
        assert world.look() == []
    assert world.look(1) == [0]


def test_who_comes_later_and_who_goes() -> None:
    world = World()
    world.look(0, 1)
    for _ in range(5):
        world.look(1)
    world.signs[2] = 0
    del world.signs[0]
    for _ in range(10):
        assert world.look(1) == []
    assert world.look(1) == [2]
