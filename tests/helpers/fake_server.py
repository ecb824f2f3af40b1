"""The server's end of a connection, in the hands of a test: it says what is received, and when.

A worker's frame waits in its connection until `FakeServer.receive` asks for it.
"""

from __future__ import annotations

import struct
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from hvd_order._native import _torch as native

__all__ = ["CONTROL", "PULL", "PUSH", "VALUE", "FakeServer", "Frame"]

CONTROL, PUSH, PULL, VALUE = 1, 2, 3, 4  # FrameKind (csrc/servers/wire/frame.h)
_TIMEOUT = timedelta(seconds=30)
_HEADER = struct.Struct("<IBBHQQIIIIIQQ")
_MAGIC, _VERSION = 0x4F445648, 1
_DEPTH = 3  # frames that the other end has posted receives for
_SESSIONS = (1, 2)  # in frames of the worker, and of the server


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
    """One end of a connection to a `ServerTransport` of this process."""

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
                lambda side: dist.ProcessGroupGloo(side[1], side[0], 2, _TIMEOUT),
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
