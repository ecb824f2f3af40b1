"""What the exchanges of this process did lately, so that a rank that has joined can do the same.

An exchange moves gradients only if every rank takes part. While a rank waits in ``join()``, the
others therefore tell it each of their *step events*, and it does what they do, with zeros. In a job
where nobody has joined, an event costs one entry in a list.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Protocol

from hvd_order.c10d.job.messages import Message
from hvd_order.errors import InvalidUsage

__all__: list[str] = []

# Ranks are at most a step apart, since nobody ends a step without the others' gradients.
_KEPT = 64


class StandIn(Protocol):
    """An exchange whose rank may join."""

    def prepare_to_join(self) -> None:
        """Finishes what this rank has begun."""

    def stand_in(self, event: str) -> None:
        """Does what another rank has done, without gradients; notes one event."""

    def end_join(self) -> None:
        """All ranks have joined; what was begun and not ended is given up."""


def process_set_of(key: str) -> int:
    """The number of the process set whose exchange has this key."""
    return int(key.partition("/")[0])


class StepLog:
    """The events of one exchange.

    Attributes:
        key: of the exchange; the same on all ranks.
        count: events so far; an event's number is the count before it.
    """

    def __init__(self, logs: StepLogs, key: str, exchange: StandIn) -> None:
        """Used by `StepLogs.open`."""
        self.key = key
        self.count = 0
        self._logs = logs
        self._recent: deque[str] = deque(maxlen=_KEPT)
        self._exchange = weakref.ref(exchange)

    @property
    def exchange(self) -> StandIn | None:
        """Whose log it is; None once that is gone."""
        return self._exchange()

    def note(self, event: str) -> None:
        """The exchange is about to do this; see `GradientExchange.stand_in` for what there is."""
        logs = self._logs
        with logs.lock:
            self._recent.append(event)
            self.count += 1
            if (report := logs.report) is not None:
                report(["step", self.key, self.count - 1, event])

    def since(self, count: int) -> list[Message]:
        """The events from number ``count`` on, as far as they are kept."""
        first = max(count, self.count - len(self._recent))
        recent = list(self._recent)[first - self.count :] if first < self.count else []
        return [["step", self.key, first + i, event] for i, event in enumerate(recent)]


class StepLogs:
    """The logs of all exchanges of this process.

    Attributes:
        lock: guards the logs; events are reported in their order under it.
        report: tells the ranks that have joined; None while there are none.
        joined: this rank is one of them.
    """

    def __init__(self) -> None:
        """There are no exchanges yet."""
        self.lock = threading.Lock()
        self.report: Callable[[Message], None] | None = None
        self.joined = False
        self._logs: dict[str, StepLog] = {}
        self._opened: dict[int, int] = {}

    def open(self, process_set: int, exchange: StandIn) -> StepLog:
        """A log for a new exchange; all ranks of the set make theirs in the same order."""
        with self.lock:
            serial = self._opened.get(process_set, 0)
            self._opened[process_set] = serial + 1
            log = StepLog(self, f"{process_set}/{serial}", exchange)
            self._logs[log.key] = log
            return log

    def check_nobody_joined(self, what: str) -> None:
        """Raises InvalidUsage if a rank waits in ``join()``, where it can take no part in this."""
        if self.report is not None:
            raise InvalidUsage(f"{what} while another rank waits in join(); do it before, or after")

    def get(self, key: str) -> StepLog | None:
        """The log of a key, if this process has the exchange."""
        return self._logs.get(key)

    def exchanges(self) -> list[StandIn]:
        """Those that are still there, in the order in which they were made."""
        alive = [log.exchange for log in list(self._logs.values())]
        return [exchange for exchange in alive if exchange is not None]

    def counts(self) -> dict[str, int]:
        """Of events, by key."""
        return {key: log.count for key, log in self._logs.items()}

    def recent(self) -> list[Message]:
        """All events that are kept, of exchanges that are still there."""
        with self.lock:
            logs = [log for log in self._logs.values() if log.exchange is not None]
            return [step for log in logs for step in log.since(0)]

    def start_reporting(self, counts: dict[str, int], report: Callable[[Message], None]) -> None:
        """A rank has joined that knows of so many events: it gets the later ones, now and on."""
        with self.lock:
            if self.joined:
                return
            self.report = report
            for log in self._logs.values():
                for step in log.since(counts.get(log.key, 0)):
                    report(step)

    def stop_reporting(self, joined: bool = False) -> None:
        """This rank waits in ``join()`` itself, or nobody does any more."""
        with self.lock:
            self.report = None
            self.joined = joined
