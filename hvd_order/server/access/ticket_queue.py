"""Who has come to the job's store: each takes a number from a counter, then fills the number's key.

Somebody may take a number and never fill it: a process that died in between, or a stranger. Such a
gap holds nobody up, and after a while it is looked at no more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

__all__ = ["CountingStore", "TicketQueue"]

_MOST_OPEN = 256  # numbers that are waited for at a time; more are a stranger's doing


class CountingStore(Protocol):
    """What is needed of torch.distributed's Store; nothing of it waits."""

    def add(self, key: str, value: int, /) -> int:
        """Adds to a number, 0 at first. Returns the sum."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys are set."""


class TicketQueue:
    """The numbers whose keys have been filled, each once, in whatever order they are filled."""

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
        """Has seen nobody.

        Args:
            counter: key of the number of those who have come.
            key: of a number; filled by who took it.
            patience: for a number to be filled after it was taken.
            given_up: takes a line for the log.
            first: numbers before it are not looked at.
            clock: seconds.
        """
        self._store = store
        self._counter = counter
        self._key = key
        self._patience_s = patience.total_seconds()
        self._given_up = given_up
        self._next = first
        self._clock = clock
        self._open: dict[int, float] = {}  # taken and not filled -> until when it is waited for

    def look(self) -> list[int]:
        """Who has come since the last look. Whatever the store raises is passed on."""
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
