"""The worker's side when a server is lost, or answers nonsense, in the middle of something.

The servers are ends of connections in the hands of the test, so every order of events is certain.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from hvd_order._native import _torch as native
from hvd_order.base.errors import BrokenInvariant, InvalidUsage, PeerLost

CONTROL, PUSH, PULL, VALUE = 1, 2, 3, 4  # FrameKind (csrc/servers/wire/frame.h)
_HEADER = struct.Struct("<IBBHQQIIIIIQQ")
_MAGIC, _VERSION = 0x4F445648, 1
_DEPTH = 3  # frames that the other end has posted receives for
_SESSIONS = (1, 2)  # in frames of the worker, and of the server
TIMEOUT_S = 20.0
SLICE_BYTES = 4096
MODEL = 0


class Frame(NamedTuple):
    """A frame about a slice."""

    kind: int
    model: int
    layout: int
    slice: int
    round: int
    map: int
    argument: int
    payload: bytes


class FakeServer:
    """The server's end of a connection to a `ServerTransport` of this process.

    A worker's frame waits in its connection until `receive` asks for it.
    """

    def __init__(self, worker: native.ServerTransport, server: int, largest: int = 1 << 20) -> None:
        """Connects.

        Args:
            worker: the other end.
            server: its number there.
            largest: bytes of a payload that the worker may send.
        """
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        other = dist.TCPStore("127.0.0.1", store.port, is_master=False)
        with ThreadPoolExecutor() as threads:
            self._group, theirs = threads.map(
                lambda side: dist.ProcessGroupGloo(side[1], side[0], 2, timedelta(seconds=30)),
                enumerate([store, other]),
            )
        self._sent = self._received = 0
        sends, receives = _SESSIONS
        worker.connect(
            server,
            native.PairConnection(theirs, sends=sends, receives=receives, largest_payload=largest),
        )

    def receive(self, kind: int) -> Frame:
        """The next frame of this kind; those before it are dropped."""
        while True:
            header = torch.zeros(64, dtype=torch.uint8)
            tag = 2 * (self._received % _DEPTH)
            self._group.recv([header], 1, tag).wait()
            fields = _HEADER.unpack(header.numpy().tobytes()[: _HEADER.size])
            payload = torch.zeros(fields[11], dtype=torch.uint8)
            if len(payload) > 0:
                self._group.recv([payload], 1, tag + 1).wait()
            self._received += 1
            if fields[2] == kind:
                return Frame(kind, *fields[6:11], fields[12], payload.numpy().tobytes())

    def answer(self, to: Frame, values: torch.Tensor) -> None:
        """Answers a push or a pull of a slice; see `send`."""
        part = to.argument >> 32 if to.kind == PULL else 1
        self.send(to._replace(kind=VALUE, map=part, argument=0, payload=values.numpy().tobytes()))

    def send(self, frame: Frame) -> None:
        """Sends a frame, and waits until the worker has received it."""
        fields = _HEADER.pack(
            _MAGIC, _VERSION, frame.kind, 0, _SESSIONS[1], self._sent, *frame[1:6],
            len(frame.payload), frame.argument,
        )  # fmt: skip
        header = fields + struct.pack("<I", _crc32c(fields))
        tag = 2 * (self._sent % _DEPTH)
        works = [self._group.send([torch.frombuffer(bytearray(header), dtype=torch.uint8)], 1, tag)]
        if frame.payload:
            content = torch.frombuffer(bytearray(frame.payload), dtype=torch.uint8)
            works.append(self._group.send([content], 1, tag + 1))
        for work in works:
            work.wait()
        self._sent += 1

    def end(self) -> None:
        """Breaks the connection, as the end of its process does."""
        del self._group


def _crc32c(data: bytes) -> int:
    rest = 0xFFFFFFFF
    for byte in data:
        rest ^= byte
        for _ in range(8):
            rest = rest >> 1 ^ (0x82F63B78 if rest & 1 else 0)
    return rest ^ 0xFFFFFFFF


class Worker:
    """A transport of one worker, whose model has slices of one tensor each."""

    def __init__(self) -> None:
        self._losses: dict[int, threading.Event] = {}
        self.transport = native.ServerTransport(
            rank=0,
            workers=1,
            ordered=True,
            asks_first=False,
            on_lost=lambda server, _why: self._losses[server].set(),
            on_control=lambda _server, _text: self._heard.set(),
        )
        self._heard = threading.Event()
        self.buffer = torch.empty(0)
        self.engine: native.Engine | None = None
        self._servers: list[FakeServer] = []

    def connect(self, servers: int, largest: int = 1 << 20) -> list[FakeServer]:
        """Connects servers 0, 1, ... that accept payloads of so many bytes."""
        for server in range(servers):
            self._losses[server] = threading.Event()
            self._servers.append(FakeServer(self.transport, server, largest))
        return self._servers

    def take_all(self, server: FakeServer) -> None:
        """Waits until the worker has handled what the server has sent."""
        server.send(Frame(CONTROL, 0, 0, 0, 0, 0, 0, b"{}"))
        assert self._heard.wait(TIMEOUT_S)

    def lose(self, server: int) -> None:
        """Breaks the connection to a server, and waits until the worker has noticed."""
        self._servers[server].end()
        assert self._losses[server].wait(TIMEOUT_S)

    def register(self, *places: tuple[int, int]) -> None:
        """Registers a model of a slice for each place; its gradients are ones."""
        self.layout = native.SliceLayout(
            [(f"tensor{i}", SLICE_BYTES, 0) for i in range(len(places))], SLICE_BYTES, False
        )
        assert len(self.layout.slices) == len(places)
        self.buffer = torch.ones(len(places) * SLICE_BYTES // 4, dtype=torch.float32)
        self.transport.prepare(MODEL, list(places), [])
        self.transport.set_buffers(MODEL, [self.buffer], self.layout)

    def push(self) -> None:
        """Sends the gradient of the only slice."""
        self.engine = native.Engine(
            rank=0,
            size=1,
            agreement=native.AgreementKind.LEADER,
            policy=native.Policy.PRIORITY,
            credit_bytes=1 << 20,
            timeout_s=TIMEOUT_S,
            stall_warning_s=TIMEOUT_S,
            transport=self.transport,
            control=None,
        )
        self.engine.add_model(MODEL, self.layout)
        self.engine.tensor_ready(MODEL, 0)

    def sum(self) -> torch.Tensor:
        """The answer to what `push` has sent."""
        assert self.engine is not None
        self.engine.wait(MODEL, 0)
        return self.buffer

    def close(self) -> None:
        for server in self._servers:
            if hasattr(server, "_group"):
                server.end()
        if self.engine is not None:
            self.engine.shutdown()
        self.transport.close()


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


def full(value: float) -> torch.Tensor:
    """The content of a slice."""
    return torch.full((SLICE_BYTES // 4,), value, dtype=torch.float32)


def test_a_pull_that_fails_leaves_nothing_to_late_answers(worker: Worker) -> None:
    """Slice 1 is on a server that this worker has no connection to; slice 0 has been asked for."""
    (server,) = worker.connect(1)
    worker.register((0, -1), (1, -1))
    with pytest.raises(BrokenInvariant, match="no connection to server 1"):
        worker.transport.pull(MODEL, 1, TIMEOUT_S)
    assert not worker.transport.waits()
    server.answer(server.receive(PULL), full(7))
    worker.take_all(server)
    worker.transport.set_map(MODEL, [(0, -1)] * 2)  # server 1 is gone from the map
    with pytest.raises(InvalidUsage, match="late answers could be taken for new ones"):
        worker.transport.pull(MODEL, 1, TIMEOUT_S)
    assert worker.buffer.equal(torch.ones_like(worker.buffer))


def test_a_pull_goes_on_with_the_replica_and_takes_each_answer_for_what_it_is(
    worker: Worker,
) -> None:
    owner, replica = worker.connect(2)
    worker.register((0, 1), (0, 1))
    with ThreadPoolExecutor() as threads:
        pulled = threads.submit(worker.transport.pull, MODEL, 1, TIMEOUT_S)
        owner.answer(owner.receive(PULL), full(2))
        owner.receive(PULL)
        worker.lose(0)
        worker.transport.set_map(MODEL, [(1, -1)] * 2)
        asked = replica.receive(PULL)
        replica.answer(asked, full(3))
        assert pulled.result() == [0, 1]
        assert worker.buffer.equal(torch.cat([full(2), full(3)]))

        pulled = threads.submit(worker.transport.pull, MODEL, 2, TIMEOUT_S)
        first, second = replica.receive(PULL), replica.receive(PULL)
        replica.answer(asked, full(4))  # once more what was asked before
        replica.answer(first, full(5))
        replica.answer(first, full(6))
        replica.answer(second, full(7))
        assert pulled.result() == [0, 1]
        assert worker.buffer.equal(torch.cat([full(5), full(7)]))


def test_a_pull_ends_when_nobody_has_its_slices(worker: Worker) -> None:
    owner, _other = worker.connect(2)
    worker.register((0, -1))
    with ThreadPoolExecutor() as threads:
        pulled = threads.submit(worker.transport.pull, MODEL, 1, TIMEOUT_S)
        owner.receive(PULL)
        worker.lose(0)
        with pytest.raises(PeerLost, match="server 0 is gone, and nobody has a copy"):
            pulled.result()


def test_a_sum_that_cannot_be_sent_leaves_nothing_behind(worker: Worker) -> None:
    """What is left behind is called when the transport closes, and by then it is gone."""
    worker.connect(1, largest=SLICE_BYTES // 2)
    with pytest.raises(BrokenInvariant, match="on a connection for"):
        worker.transport.time_stream([full(1)], 1)
    assert not worker.transport.waits()


def test_a_sum_ends_with_its_server(worker: Worker) -> None:
    server, _other = worker.connect(2)
    with ThreadPoolExecutor() as threads:
        try:
            timed = threads.submit(worker.transport.time_stream, [full(1)], 1)
            server.receive(PUSH)
            worker.lose(0)
            with pytest.raises(PeerLost, match="server 0 is gone"):
                timed.result(TIMEOUT_S)
        finally:
            worker.transport.close()  # ends the sum in any case


def test_an_answer_that_does_not_fit_leaves_the_slice_to_the_replica(worker: Worker) -> None:
    owner, replica = worker.connect(2)
    worker.register((0, 1))
    worker.push()
    owner.answer(owner.receive(PUSH), torch.zeros(4))
    worker.lose(0)
    worker.transport.set_map(MODEL, [(1, -1)])
    replica.answer(replica.receive(PUSH), full(5))
    assert worker.sum().equal(full(5))


def test_a_repeated_push_carries_the_gradient_even_if_it_is_sent_after_the_answer(
    worker: Worker,
) -> None:
    """A replica that lacks the round, as a divergence bound permits, applies what comes."""
    owner, next_owner, _replica = worker.connect(3)
    worker.register((0, 2))
    worker.push()
    pushed = owner.receive(PUSH)
    worker.lose(2)
    worker.transport.set_map(MODEL, [(1, 2)])  # repeats the push, which waits to be received
    owner.answer(pushed, full(7))
    assert worker.sum().equal(full(7))
    repeated = next_owner.receive(PUSH)
    assert repeated.round == pushed.round
    assert repeated.payload == pushed.payload == full(1).numpy().tobytes()


def test_a_callback_may_drop_the_transport() -> None:
    """As where init() fails while a server speaks: then no other thread has the transport."""
    dropped = threading.Event()
    owners: list[native.ServerTransport] = []

    def drop(_server: int, _why: str) -> None:
        owners.clear()
        dropped.set()

    owners.append(
        native.ServerTransport(
            rank=0, workers=1, ordered=True, asks_first=False, on_lost=drop, on_control=drop
        )
    )
    server = FakeServer(owners[0], 0)
    server.send(Frame(CONTROL, 0, 0, 0, 0, 0, 0, b"{}"))
    assert dropped.wait(TIMEOUT_S)
    server.end()
