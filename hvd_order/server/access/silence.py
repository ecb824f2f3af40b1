"""Which servers have given no sign of life for too long while somebody waits. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from datetime import timedelta

__all__ = ["Silence"]


class Silence:
    """Counts how long each server has been silent, by looks at its signs of life.

    A look counts for the time since the one before, but for two intervals at most: in a longer one
    this process itself did not run, or waited for something else, and what is asked of the servers
    is not their silence while nobody listened.
    """

    def __init__(
        self, limit: timedelta, interval_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Nobody is silent yet.

        Args:
            limit: longest silence.
            interval_s: between two looks.
            clock: seconds.
        """
        self._limit_s = limit.total_seconds()
        self._doubtful_s = self._limit_s / 4  # no interval between two signs is that long
        self._most_s = 2 * interval_s
        self._clock = clock
        self._looked_s = clock()
        self._signs: dict[int, Hashable] = {}
        self._silent_s: dict[int, float] = {}

    def look(self, waits: bool, signs: Mapping[int, Hashable]) -> list[int]:
        """Takes in the signs of all servers.

        Args:
            waits: whether anything is expected of any server; else all may be silent.
            signs: of each, something that changes while it lives.

        Returns:
            Those that have been silent for too long. None while others are in doubt: what one had
            is not to go to another that is lost as well.
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
