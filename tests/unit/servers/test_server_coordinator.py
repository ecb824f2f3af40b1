"""What worker 0 decides about servers that come, go and are lost: its transport is a fake here."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from hvd_order.base.config import Config
from hvd_order.base.errors import PeerLost, TransferTimeout
from hvd_order.servers.launch.server_starter import ServerStarter
from hvd_order.servers.process import messages
from hvd_order.servers.process.coordinator import Coordinator
from hvd_order.servers.process.scale_requests import ScaleRequests
from hvd_order.servers.worker.connections import MeetingPoint

KEY = b"the secret of this job.........."
MIB = 2**20
SLICES = 40
LIMIT_S = 20.0


class FakeLayout:
    slices = [SimpleNamespace(size_bytes=MIB, buffer=0)] * SLICES

    @staticmethod
    def slice_name(index: int) -> str:
        return f"weight{index}[0:262144]"


class FakeTransport:
    """Servers that answer at once what they hold, and take `speed` bytes a second.

    Attributes:
        slow: servers that take a quarter of it.
        mute: servers that say nothing.
        told: what the servers were told, beside questions.
        keeps: the server that each slice's state is on, where that is not its owner's.
    """

    def __init__(self, servers: int, answers: messages.ServerAnswers) -> None:
        self.there = list(range(servers))
        self.answers = answers
        self.speed = 10.0 * MIB
        self.slow: set[int] = set()
        self.places: list[tuple[int, int]] = []
        self.mute: set[int] = set()
        self.told: list[tuple[int, str]] = []
        self.keeps: dict[int, int] = {}

    def servers(self) -> list[int]:
        return self.there

    def set_map(self, _model: int, places: list[tuple[int, int]]) -> None:
        if self.mute:  # what it has does not get away from it
            self.keeps = {i: o for i, (o, _) in enumerate(self.places) if o in self.mute}
        self.places = places

    def owned(self, server: int) -> list[int]:
        return [i for i, (owner, _) in enumerate(self.places) if owner == server]

    def take_figures(self) -> list[tuple[int, int, float]]:
        figures = []
        for server in self.there:
            size_bytes = len(self.owned(server)) * MIB
            speed = self.speed / (4 if server in self.slow else 1)
            figures.append((server, size_bytes, size_bytes / speed))
        return figures

    def send_control(self, server: int, text: str) -> None:
        what = json.loads(text)["what"]
        if what != "audit":
            self.told.append((server, what))
        elif server not in self.mute:
            held = [[0, 0, i, True, 1, 0] for i in self.owned(server) if i not in self.keeps]
            self.answers.take(server, json.dumps({"what": "audit", "held": held}))


class World:
    """A coordinator with a model, whose clock stands still between steps."""

    def __init__(self, servers: int, limit_s: float = LIMIT_S, **settings: Any) -> None:
        self.now_s = 0.0
        self.answers = messages.ServerAnswers(timedelta(seconds=limit_s))
        self.transport = FakeTransport(servers, self.answers)
        config = Config(timeout=timedelta(seconds=limit_s), servers=servers, **settings)
        fake: Any = self.transport
        self.coordinator = Coordinator(config, fake, self.answers, clock=lambda: self.now_s)
        layout: Any = FakeLayout()
        self.transport.places = self.coordinator.place(0, layout)
        self.coordinator.registered(0)

    def steps(self, count: int, compute_s: float) -> None:
        """Steps that hide no communication."""
        for _ in range(count):
            self.now_s += compute_s + max(busy_s for *_, busy_s in self.transport.take_figures())
            self.coordinator.step_taken()

    def steps_until(self, happened: Callable[[], bool], compute_s: float) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not happened():
            assert time.monotonic() < deadline
            self.steps(1, compute_s)


class FakeServers:
    """What the launcher starts: processes that run until they are told their exit code."""

    def __init__(self, started: Callable[[], None] = lambda: None, error: str = "") -> None:
        self.codes: list[int | None] = []
        self._started = started
        self._error = error

    def running(self) -> int:
        return self.codes.count(None)

    def start(self) -> tuple[str, Any]:
        if self._error:
            raise OSError(self._error)
        self.codes.append(None)
        place = len(self.codes) - 1
        self._started()
        return "host b", SimpleNamespace(poll=lambda: self.codes[place])


@pytest.fixture
def meeting() -> MeetingPoint:
    return MeetingPoint("127.0.0.1:0", timedelta(seconds=LIMIT_S), listen=True)


def launcher(meeting: MeetingPoint, servers: FakeServers, most: int) -> ServerStarter:
    anything: Any = servers
    return ServerStarter(meeting._connect(), KEY, anything, most)


def test_by_policy_a_server_comes_and_gets_slices(
    meeting: MeetingPoint, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="hvd_order")
    world = World(2, max_servers=3)

    def started() -> None:
        world.transport.there.append(2)
        threading.Thread(target=world.coordinator.server_joined, args=(2,)).start()

    servers = FakeServers(started)
    watching = launcher(meeting, servers, most=3)
    world.coordinator.scale_by(ScaleRequests(meeting, KEY))
    try:
        world.steps(60, compute_s=0.1)
        world.steps_until(lambda: 2 in {owner for owner, _ in world.transport.places}, 0.1)
        world.steps(200, compute_s=0.1)
    finally:
        world.coordinator.close()
        watching.close()
    assert len(servers.codes) == 1
    lines = [line for line in caplog.messages if "one server more" in line]
    assert len(lines) == 1, caplog.messages
    assert "communication of 2 s a step should become 1.33 s" in lines[0]


def test_by_policy_a_server_goes_that_nobody_would_miss(meeting: MeetingPoint) -> None:
    world = World(3, min_servers=2)
    world.coordinator.scale_by(ScaleRequests(meeting, KEY))
    try:
        world.steps(40, compute_s=100.0)
        world.steps_until(lambda: bool(world.transport.told), 100.0)
        world.steps(300, compute_s=100.0)
    finally:
        world.coordinator.close()
    ((gone, word),) = world.transport.told
    assert word == "leave"
    assert {owner for owner, _ in world.transport.places} == {0, 1, 2} - {gone}


def test_without_limits_servers_stay_as_they_are(meeting: MeetingPoint) -> None:
    world = World(3)
    world.coordinator.scale_by(ScaleRequests(meeting, KEY))
    world.steps(300, compute_s=100.0)
    world.steps(300, compute_s=0.0)
    world.coordinator.close()
    assert world.transport.told == []
    assert meeting.count("scale_requests") == 0


def ask_for_server(meeting: MeetingPoint, patience_s: float = LIMIT_S) -> int:
    import queue

    requests = ScaleRequests(meeting, KEY, timedelta(seconds=patience_s))
    return requests.request_server(queue.SimpleQueue(), threading.Event())


def test_the_launcher_says_why_there_is_no_server(
    meeting: MeetingPoint, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(TransferTimeout, match="only hvd-order run with --max-servers"):
        ask_for_server(meeting, patience_s=0.3)
    broken = launcher(meeting, FakeServers(error="no ssh here"), most=3)
    with pytest.raises(Exception, match="could not start it: no ssh here"):
        ask_for_server(meeting)
    broken.close()
    full = FakeServers()
    full.codes = [None, None, 0]  # one has left: its place is free
    watching = launcher(meeting, full, most=3)
    threading.Timer(0.5, lambda: full.codes.__setitem__(3, 1)).start()
    with pytest.raises(Exception, match="it ended on host b with code 1"):
        ask_for_server(meeting)
    full.codes[3] = None
    with pytest.raises(Exception, match="3 run already, as --max-servers allows"):
        ask_for_server(meeting)
    watching.close()
    # Those that nobody wants any more are not followed by the next launcher, nor a stranger's.
    assert capfd.readouterr().err.count("no server could be started") == 3
    assert len(full.codes) == 4
    store, stranger = meeting.own(), meeting.count("scale_requests")
    store.set(f"scale_request/{stranger}", json.dumps(['{"what": "start"}', "0" * 64]))
    late = FakeServers()
    watching = launcher(meeting, late, most=3)
    deadline = time.monotonic() + LIMIT_S
    while "is not followed" not in (said := capfd.readouterr().err):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    watching.close()
    assert f"scale request {stranger} is not signed" in said
    assert late.codes == []


# ----------------------------------------------------------------- lost


def test_slices_move_away_from_a_slow_server_after_another_was_lost() -> None:
    world = World(3, ps_replicas=True)
    world.steps(20, compute_s=0.1)
    world.transport.there.remove(2)
    world.coordinator.lost(2, "connection reset")
    world.transport.slow = {0}
    world.steps(400, compute_s=0.1)
    world.coordinator.close()
    assert {server for place in world.transport.places for server in place} == {0, 1}
    assert len(world.transport.owned(0)) < len(world.transport.owned(1)) / 2


# ----------------------------------------------------------------- lost while it is being removed


def remove_and_lose(world: World) -> None:
    world.transport.mute.add(0)
    timer = threading.Timer(0.3, world.coordinator.lost, (0, "connection reset"))
    timer.start()
    begin = time.monotonic()
    try:
        world.coordinator.remove(0)
    finally:
        timer.join()
        world.coordinator.close()
        assert time.monotonic() - begin < LIMIT_S / 2  # who is lost is not waited for


def test_a_server_with_copies_may_be_lost_while_it_leaves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(3, ps_replicas=True)
    remove_and_lose(world)
    assert "server 0 is gone (connection reset) while it was leaving" in caplog.text
    assert all(0 not in place for place in world.transport.places)
    assert all(owner != replica for owner, replica in world.transport.places)
    assert world.transport.told == []


def test_a_server_without_copies_may_be_lost_once_it_holds_nothing() -> None:
    world = World(2)
    world.transport.set_map = lambda _model, places: setattr(world.transport, "places", places)  # type: ignore[method-assign]
    remove_and_lose(world)
    assert {owner for owner, _ in world.transport.places} == {1}


def test_training_fails_with_a_server_that_leaves_with_slices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from hvd_order.servers.process import coordinator

    failures: list[str] = []
    world = World(2)
    world.coordinator.fail = failures.append
    monkeypatch.setattr(coordinator, "_ARRIVE_S", 0.2)
    with pytest.raises(PeerLost, match=r"server 0 is gone .* nobody has a copy of 20 slices"):
        remove_and_lose(world)
    assert len(failures) == 1
    assert "HVD_ORDER_PS_REPLICAS=1" in failures[0]


def test_a_removal_that_took_too_long_may_be_tried_again() -> None:
    world = World(2, limit_s=0.3)
    world.transport.mute.add(0)
    with pytest.raises(TransferTimeout, match="server 0 has not answered 'audit'"):
        world.coordinator.remove(0)
    world.transport.mute.clear()
    world.transport.keeps.clear()
    world.coordinator.remove(0)
    world.coordinator.close()
    assert world.transport.told == [(0, "leave")]


def test_a_removal_does_not_outlast_the_job() -> None:
    world = World(2)
    world.transport.mute.add(0)
    threading.Timer(0.2, world.coordinator.close).start()
    begin = time.monotonic()
    with pytest.raises(TransferTimeout, match="before the job was over"):
        world.coordinator.remove(0)
    assert time.monotonic() - begin < LIMIT_S / 2
