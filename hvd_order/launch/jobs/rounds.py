"""A round: one formation of the job, from all workers' start to their end or restart."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Failure", "JobEnded", "OneRound", "Round", "RoundInbox", "Stopped"]


@dataclass(frozen=True)
class Round:
    """A round as one host sees it.

    Attributes:
        number: counts up from 1.
        place: of this host among the hosts; ranks follow the hosts' order.
        host_count: how many hosts take part.
        first_rank: of this host's workers.
        process_count: how many workers this host starts.
        size: how many workers there are on all hosts.
        address, port: of the store at which all workers meet.
    """

    number: int
    place: int
    host_count: int
    first_rank: int
    process_count: int
    size: int
    address: str
    port: int


@dataclass(frozen=True)
class Failure:
    """The first worker of a host that failed in a round; a negative code is the signal."""

    rank: int
    code: int


class JobEnded(Exception):  # noqa: N818  (says what happened)
    """There will be no further round for this host."""


class Stopped(Exception):  # noqa: N818  (says what happened)
    """This process got a signal; the workers got it too, and have ended.

    Attributes:
        signal: its number.
    """

    def __init__(self, signal: int) -> None:
        super().__init__(signal)
        self.signal = signal


class OneRound:
    """The only round of a job on one host."""

    def __init__(self, only: Round) -> None:
        self._only = only

    def next_round(self, after: int, failure: Failure | None) -> Round:
        """See `RoundInbox`."""
        if after:
            raise JobEnded
        return self._only

    def newest(self) -> int:
        """See `RoundInbox`."""
        return self._only.number

    def finished(self) -> bool:
        """See `RoundInbox`."""
        return True


class RoundInbox:
    """The rounds that the launcher has announced to this host; filled by another thread.

    Args:
        report: tells the launcher that a round began here, failed here or finished here.
    """

    def __init__(self, report: Callable[[str, int, Failure | None], None]) -> None:
        self._report = report
        self._changed = threading.Condition()
        self._latest: Round | None = None
        self._began = 0
        self._ended = False

    def announce(self, announced: Round) -> None:
        """Takes a round from the launcher."""
        with self._changed:
            self._latest = announced
            self._changed.notify_all()

    def end(self) -> None:
        """Makes `next_round` raise: this host takes no part any more."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def next_round(self, after: int, failure: Failure | None) -> Round:
        """Waits for a round later than `after`, which ended here with `failure` if not None.

        Raises:
            JobEnded: there will be none.
        """
        if failure is not None:
            self._report("failed", after, failure)
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self.newest() > after)
            if self._ended or self._latest is None:
                raise JobEnded
            self._began = self._latest.number
            latest = self._latest
        self._report("began", latest.number, None)
        return latest

    def newest(self) -> int:
        """Number of the newest round; one more when this host is to leave, so that it comes."""
        number = 0 if self._latest is None else self._latest.number
        return number + 1 if self._ended else number

    def finished(self) -> bool:
        """Called when all workers of this host have succeeded; returns when all hosts' have.

        Until then others may need what is served here.

        Returns:
            Whether that is the end; False when the job forms anew nevertheless.
        """
        self._report("finished", self._began, None)
        with self._changed:
            self._changed.wait_for(lambda: self.newest() > self._began)
            return self._ended
