"""Detection of servers without a sign of life for too long while a worker waits. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from datetime import timedelta

__all__ = ["Silence"]


class Silence:
    """Measures how long each server has been silent, from looks at its signs of life.

    A look counts for the time since the previous one, but for two intervals at most: in a longer
    gap this process itself did not run, or waited for something else, and the servers must not be
    blamed for silence that no process observed.
    """

    def __init__(
        self, limit: timedelta, interval_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Starts with no silent server.

        Args:
            limit: longest silence.
            interval_s: seconds between two looks.
            clock: returns seconds.
        """
        self._limit_s = limit.total_seconds()
        self._doubtful_s = self._limit_s / 4  # longer than any interval between two signs
        self._most_s = 2 * interval_s
        self._clock = clock
        self._looked_s = clock()
        self._signs: dict[int, Hashable] = {}
        self._silent_s: dict[int, float] = {}

    def look(self, waits: bool, signs: Mapping[int, Hashable]) -> list[int]:
        """Processes the signs of all servers.

        Args:
            waits: whether any server is expected to send; otherwise all may be silent.
            signs: for each server, a value that changes while it is alive.

        Returns:
            The servers that have been silent for too long. Empty while other servers are in doubt:
            slices of one lost server must not go to another lost one.
        """
        now_s = self._clock()
        counts_s = min(now_s - self._looked_s, self._most_s)
        self._looked_s = now_s
        for server, sign in signs.items():
            lives = not waits or self._signs.get(server, _NONE) != sign
            self._silent_s[server] = 0.0 if lives else self._silent_s[server] + counts_s
        self._signs = dict(signs)
        self._silent_s = {server: self._silent_s[server] for server in signs}
        if any(
            self._doubtful_s <= silent_s < self._limit_s for silent_s in self._silent_s.values()
        ):
            return []
        return [server for server in signs if self._silent_s[server] >= self._limit_s]


_NONE = object()
