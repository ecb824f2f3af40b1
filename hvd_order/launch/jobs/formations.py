"""A formation: one start of all workers of the job, until they end or are formed anew."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Formation", "FormationInbox", "JobEnded", "OnlyFormation", "Stopped", "WorkerFailure"]


@dataclass(frozen=True)
class Formation:
    """A formation from the view of one host.

    Attributes:
        number: counts up from 1.
        place: place of this host among the hosts; ranks follow the hosts' order.
        host_count: number of hosts in the formation.
        first_rank: lowest rank of this host's workers.
        process_count: number of workers on this host.
        size: number of workers on all hosts.
        address, port: address of the workers' store.
        devices: that this host's workers may use; empty: all.
    """

    number: int
    place: int
    host_count: int
    first_rank: int
    process_count: int
    size: int
    address: str
    port: int
    devices: Sequence[int] = ()


@dataclass(frozen=True)
class WorkerFailure:
    """A worker of a host that failed in a formation.

    Attributes:
        code: its exit code; negative: the signal that ended it.
        others: ranks and codes of those that failed at the same time. A rank that has lost another
            one fails by an exception, and may be seen first.
    """

    rank: int
    code: int
    others: Sequence[tuple[int, int]] = ()


class JobEnded(Exception):  # noqa: N818  (says what happened)
    """There will be no further formation for this host."""


class Stopped(Exception):  # noqa: N818  (says what happened)
    """This process received a signal; the workers received it too, and have ended.

    Attributes:
        signal: number of the signal.
    """

    def __init__(self, signal: int) -> None:
        super().__init__(signal)
        self.signal = signal


class OnlyFormation:
    """The only formation of a job on one host."""

    def __init__(self, only: Formation) -> None:
        self._only = only

    def next_formation(self, after: int, failure: WorkerFailure | None) -> Formation:
        """See `FormationInbox`."""
        if after:
            raise JobEnded
        return self._only

    def newest(self) -> int:
        """See `FormationInbox`."""
        return self._only.number

    def finished(self) -> bool:
        """See `FormationInbox`."""
        return True


class FormationInbox:
    """Formations that the launcher has announced to this host; another thread fills it.

    Args:
        report: reports to the launcher that a formation began, failed or finished here.
    """

    def __init__(self, report: Callable[[str, int, WorkerFailure | None], None]) -> None:
        self._report = report
        self._changed = threading.Condition()
        self._latest: Formation | None = None
        self._began = 0
        self._ended = False

    def announce(self, announced: Formation) -> None:
        """Adds a formation from the launcher."""
        with self._changed:
            self._latest = announced
            self._changed.notify_all()

    def end(self) -> None:
        """Makes `next_formation` raise: this host has left the job."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def next_formation(self, after: int, failure: WorkerFailure | None) -> Formation:
        """Waits for a formation later than `after`, which ended here with `failure` if not None.

        Raises:
            JobEnded: there will be no further formation.
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
        """Number of the newest formation; one more if this host must leave, so that torch asks."""
        number = 0 if self._latest is None else self._latest.number
        return number + 1 if self._ended else number

    def finished(self) -> bool:
        """Called when all workers of this host have succeeded; waits for those of all hosts.

        Until then other hosts may need the store that this host serves.

        Returns:
            True at the end of the job; False if the job forms anew instead.
        """
        self._report("finished", self._began, None)
        with self._changed:
            self._changed.wait_for(lambda: self.newest() > self._began)
            return self._ended
