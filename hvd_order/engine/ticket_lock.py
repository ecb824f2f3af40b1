"""Turns at what all models of an engine share, one model after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__: list[str] = []


class TicketLock:
    """Gives turns in the order of tickets, which all ranks draw in the same order.

    Thread safety: all methods may be called from any thread.
    """

    _LOOK_S = 1.0  # a failure of the engine ends every wait by then

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards the fields below
        self._drawn = 0
        self._first = 0  # the ticket whose turn it is
        self._ended: set[int] = set()  # later tickets that were given up

    def draw(self) -> int:
        """Returns the next ticket; the owner ends it."""
        with self._changed:
            self._drawn += 1
            return self._drawn - 1

    def wait_for(self, ticket: int, check: Callable[[], None]) -> None:
        """Waits until all earlier tickets have ended.

        The waits of their owners have time limits, which tell the cause.

        Args:
            ticket: as drawn.
            check: raises if the wait is of no use any more.
        """
        with self._changed:
            while self._first != ticket:
                if not self._changed.wait(self._LOOK_S):
                    check()

    def end(self, ticket: int) -> None:
        """Ends a turn, or gives up a ticket."""
        with self._changed:
            self._ended.add(ticket)
            while self._first in self._ended:
                self._ended.discard(self._first)
                self._first += 1
            self._changed.notify_all()
