"""Ticket queue in the job's store: a newcomer draws a number from a counter, then fills its key.

A process may draw a number and never fill its key: it died in between, or is a stranger. Such a
gap delays no other process, and after a while the queue ignores it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

__all__ = ["CountingStore", "TicketQueue"]

_MOST_OPEN = 256  # open numbers at a time; only a stranger would cause more


class CountingStore(Protocol):
    """The required methods of torch.distributed's Store; none of them waits."""

    def add(self, key: str, value: int, /) -> int:
        """Adds to a number, which starts at 0. Returns the sum."""

    def check(self, keys: list[str], /) -> bool:
        """Returns whether all keys are set."""


class TicketQueue:
    """The numbers whose keys have been filled, each once, in any order."""

    def __init__(
        self,
        store: CountingStore,
        counter: str,
        key: Callable[[int], str],
        patience: timedelta,
        given_up: Callable[[str], None],
        first: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Creates the queue; no number was seen yet.

        Args:
            store: the store.
            counter: key of the counter of drawn numbers.
            key: returns the key of a number; the process that drew the number fills it.
            patience: longest time between drawing and filling.
            given_up: called with a line for the log.
            first: numbers before it are ignored.
            clock: returns seconds.
        """
        self._store = store
        self._counter = counter
        self._key = key
        self._patience_s = patience.total_seconds()
        self._given_up = given_up
        self._next = first
        self._clock = clock
        self._open: dict[int, float] = {}  # drawn and not filled -> end of the wait for it

    def look(self) -> list[int]:
        """Returns the numbers filled since the last look. Errors of the store are passed on."""
        count = int(self._store.add(self._counter, 0))
        now_s = self._clock()
        if count - self._next > _MOST_OPEN:
            skipped = count - _MOST_OPEN
            self._given_up(f"{self._key(self._next)} to {self._key(skipped - 1)} are left out: "
                           f"nobody takes so many numbers at once")  # fmt: skip
            self._next = skipped
        for number in range(self._next, count):
            self._open[number] = now_s + self._patience_s
        self._next = max(self._next, count)
        come = [number for number in self._open if self._store.check([self._key(number)])]
        for number in come:
            del self._open[number]
        for number in [number for number, until_s in self._open.items() if until_s <= now_s]:
            self._give_up(number, f"within {self._patience_s:g} s")
        while len(self._open) > _MOST_OPEN:
            self._give_up(next(iter(self._open)), "while many more numbers were taken")
        return come

    def _give_up(self, number: int, when: str) -> None:
        del self._open[number]
        self._given_up(
            f"{self._key(number)} is left out: somebody took that number, and nothing came {when}"
        )
