"""The thread that transfers the engines' slices and messages over MPI.

MPI needs polling, and its own waits occupy a core. So one thread serves all engines of the process:
it starts their slices, tests for their completion, and transfers control messages. It polls every
0.2 ms while something is or recently was in flight, and every 2 ms otherwise.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from mpi4py import MPI

from hvd_order._native._core import PolledPort
from hvd_order.tensorflow.backend.mpi.arrays import sendable, summing, view
from hvd_order.tensorflow.backend.mpi.members import Members

__all__ = ["BUSY_S", "Mover", "Served"]

BUSY_S = 2e-4
"""Pauses between two polls."""
_IDLE_S = 2e-3
_LINGER_S = 0.1  # the answer to a message arrives soon
_TAG = 1


@dataclass
class Served:
    """An engine that the mover serves.

    Attributes:
        port: requests of the engine, and notifications to it.
        data, control: communicators for slices and for messages, used only here.
        dtypes: dtypes of each model's buffers.
        memory: each model's buffers, which slices name by address.
        under_way: number and request of slices in flight, oldest first, with views of their memory.
        posted: messages that are being sent, with their memory.
    """

    port: PolledPort
    data: Members
    control: Members
    dtypes: dict[int, list[np.dtype[Any]]] = field(default_factory=dict)
    memory: dict[int, list[Any]] = field(default_factory=dict)
    under_way: list[tuple[int, MPI.Request, Any]] = field(default_factory=list)
    posted: list[tuple[MPI.Request, Any]] = field(default_factory=list)


# Engines with slices that MPI may still write to: a collective that has begun cannot be cancelled.
_abandoned: list[Served] = []


class Mover:
    """The mover thread; it runs from construction to `stop`."""

    def __init__(self) -> None:
        self._served: list[Served] = []
        self._lock = threading.Lock()  # held while engines are served, and to change the list
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="hvd_order mpi", daemon=True)
        self._thread.start()

    def serve(self, one: Served) -> None:
        """Adds an engine."""
        with self._lock:
            self._served.append(one)

    def leave(self, one: Served) -> None:
        """Removes an engine; its transfers in flight fail."""
        with self._lock:
            self._served.remove(one)
        if one.under_way:
            _abandoned.append(one)
        one.port.close()

    def stop(self) -> None:
        """Ends the thread."""
        self._stopped = True
        self._thread.join()

    def _run(self) -> None:
        busy_until_s = 0.0
        while not self._stopped:
            with self._lock:
                try:
                    busy = [_serve(one) for one in self._served]
                except Exception as error:  # it would otherwise be lost
                    self._give_up(f"{type(error).__name__}: {error}")
                    return
                first = self._served[0].port if self._served else None
            now_s = time.monotonic()
            if any(busy):
                busy_until_s = now_s + _LINGER_S
            pause_s = BUSY_S if now_s < busy_until_s else _IDLE_S
            if first is None:
                time.sleep(pause_s)
            else:
                first.wait(pause_s)  # a new slice of the engine of all ranks ends it

    def _give_up(self, why: str) -> None:
        """Stops all transfers and reports the error to all waiting engines."""
        for one in self._served:
            for peer in range(one.control.size):
                if peer != one.control.rank:
                    one.port.lost(peer, f"rank {one.control.ranks[peer]} cannot be reached: {why}")


def _serve(one: Served) -> bool:
    """Handles one engine; returns whether anything is in flight."""
    while (slice_ := one.port.next_slice()) is not None:
        number, model, buffer, address, size_bytes = slice_
        part = view(address, size_bytes, one.dtypes[model][buffer])
        request = _started(one, number, part)
        if request is not None:
            one.under_way.append((number, request, part))
    one.under_way = [each for each in one.under_way if not _is_done(one, each[0], each[1])]
    while (message := one.port.next_message()) is not None:
        rank, words = message
        packed = np.array(words, np.uint32)
        _guarded(one, rank, lambda r=rank, p=packed: one.posted.append(  # type: ignore[misc]
            (one.control.comm.Isend(p, dest=r, tag=_TAG), p)))  # fmt: skip
    one.posted = [each for each in one.posted if not each[0].Test()]
    status = MPI.Status()
    while one.control.comm.Iprobe(source=MPI.ANY_SOURCE, tag=_TAG, status=status):
        received = np.zeros(status.Get_count(MPI.UINT32_T), np.uint32)
        one.control.comm.Recv(received, source=status.Get_source(), tag=_TAG)
        one.port.received(status.Get_source(), received.tolist())
    return bool(one.under_way or one.posted)


def _started(one: Served, number: int, part: Any) -> MPI.Request | None:
    try:
        return one.data.comm.Iallreduce(MPI.IN_PLACE, sendable(part), summing(part.dtype))
    except MPI.Exception as error:
        one.port.done(number, error.Get_error_string())
        return None


def _is_done(one: Served, number: int, request: MPI.Request) -> bool:
    try:
        if not request.Test():
            return False
    except MPI.Exception as error:
        one.port.done(number, error.Get_error_string())
        return True
    one.port.done(number)
    return True


def _guarded(one: Served, peer: int, send: Callable[[], None]) -> None:
    try:
        send()
    except MPI.Exception as error:
        one.port.lost(peer, f"rank {one.control.ranks[peer]} is gone: {error.Get_error_string()}")
