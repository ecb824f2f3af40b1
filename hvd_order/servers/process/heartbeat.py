"""Heartbeats: detects a server whose process exists but no longer runs.

A killed server's connections break; those of a stopped server, or of a frozen host, stay open. So
each server keeps a number in the store that grows several times within the longest silence::

    server/3/alive       grows while server 3 runs

A waiting worker reads this number when nothing arrives over the server's connection, and also
queries the server over the connection. Any process may have written the number: an attacker can
thus keep an unresponsive server in the job, but cannot remove a server from it.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Hashable
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore

from hvd_order._native import _torch as native
from hvd_order.base.bounded import within
from hvd_order.base.config import Config
from hvd_order.servers.access.silence import Silence
from hvd_order.servers.process import messages
from hvd_order.servers.worker.connections import PARTING_S, MeetingPoint

__all__ = ["Heartbeat", "HeartbeatMonitor", "longest_silence"]

_LOOKS = 8  # within the longest silence
_MOST_S = 1.0  # between two beats


def longest_silence(config: Config) -> timedelta:
    """Returns the silence after which a server counts as lost, well below the timeout of waits."""
    return min(config.ps_silence, config.timeout / 2)


def _interval_s(limit: timedelta) -> float:
    return min(_MOST_S, limit.total_seconds() / _LOOKS)


def _key(server: int) -> str:
    return f"server/{server}/alive"


class Heartbeat:
    """A server's own heartbeat; it also detects that the server did not run.

    Thread safety: all methods may be called from any thread.
    """

    def __init__(self, meeting: MeetingPoint, server: int, limit: timedelta) -> None:
        """Starts; the first beat is in the store when this returns."""
        self._beat_s = time.monotonic()
        self._limit_s = limit.total_seconds()
        self._away_s = 0.0  # the last long pause
        self._back_s = -math.inf  # end of that pause
        self._store = meeting.own()
        self._key = _key(server)
        self._interval_s = _interval_s(limit)
        self._store.set(self._key, "0")
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        beats = 0
        while not self._closing.wait(self._interval_s):
            beats += 1
            self.away_s()
            self._beat_s = time.monotonic()
            try:
                self._store.set(self._key, str(beats))
            except RuntimeError:
                return  # the job has ended

    def away_s(self) -> float:
        """Returns the pause for which other processes may have given this one up; 0 if there is
        none.

        They give up no process before half of the longest silence, and a process that was away
        gets the news soon afterwards.
        """
        now_s = time.monotonic()
        pause_s = now_s - self._beat_s - self._interval_s
        if pause_s > self._limit_s / 2:
            self._away_s, self._back_s = pause_s, now_s
        return self._away_s if now_s - self._back_s < self._limit_s else 0.0

    def close(self) -> None:
        """Stops the beats."""
        self._closing.set()
        self._thread.join(PARTING_S)


class HeartbeatMonitor:
    """A worker's observation of the servers, on a thread of its own."""

    def __init__(
        self, meeting: MeetingPoint, transport: native.ServerTransport, limit: timedelta
    ) -> None:
        """Starts to observe.

        Args:
            meeting: the job's store.
            transport: has connections to all servers, and gives up silent ones.
            limit: longest silence.
        """
        self._meeting = meeting
        self._transport = transport
        self._limit = limit
        self._interval_s = _interval_s(limit)
        self._store: PrefixStore | None = None
        self._store_is_silent = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._look, name="heartbeat monitor", daemon=True)
        self._thread.start()

    def _look(self) -> None:
        silence = Silence(self._limit, self._interval_s)
        frames: dict[int, int] = {}
        while not self._closing.wait(self._interval_s):
            before, frames = frames, self._transport.frames_from()
            waits = self._transport.waits()
            signs: dict[int, Hashable] = {server: (count, b"") for server, count in frames.items()}
            if waits:
                quiet = [server for server, count in frames.items() if before.get(server) == count]
                try:
                    for server, sign in self._signs(quiet).items():
                        signs[server] = (frames[server], sign)
                except RuntimeError:
                    return  # the store is gone: a slow connection and a stopped server look alike
                for server in quiet:
                    self._transport.send_control(server, messages.ask("late"))
            silent = silence.look(waits, signs)
            if silent:
                self._give_up(silent)

    def _signs(self, servers: list[int]) -> dict[int, bytes]:
        """Returns the servers' signs in the store; empty if the store itself does not answer."""
        if self._store_is_silent or not servers:
            return {}

        def look() -> dict[int, bytes]:
            if self._store is None:
                self._store = self._meeting.own()
            return {server: _sign(self._store, server) for server in servers}

        try:
            return within(self._limit.total_seconds() / 4, look)
        except TimeoutError:
            # The store may have stopped with the server that runs it. Frames over the connections
            # still count.
            self._store_is_silent = True
            return {}

    def _give_up(self, silent: list[int]) -> None:
        why = (
            f"it does not answer: no sign of life for {self._limit.total_seconds():g} s "
            "(HVD_ORDER_PS_SILENCE), so it was stopped, or its host is frozen or cut off"
        )
        self._transport.give_up(silent, why)

    def close(self) -> None:
        """Stops observing."""
        self._closing.set()
        self._thread.join(PARTING_S)


def _sign(store: PrefixStore, server: int) -> bytes:
    if not store.check([_key(server)]):
        return b""
    return bytes(store.get(_key(server)))
