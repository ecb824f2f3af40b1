"""Recent events of this process's exchanges, which a joined rank repeats.

An exchange moves gradients only if every rank takes part. While a rank waits in ``join()``, the
other ranks therefore send it each of their *step events*, and it repeats them with zeros. While no
rank has joined, an event costs one entry in a list.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable
from typing import Protocol

from hvd_order.base.errors import InvalidUsage
from hvd_order.engine.job.message_forms import Message

__all__: list[str] = []

# Ranks are at most a step apart, since no rank ends a step without the gradients of all ranks.
_KEPT = 64
_DEAD_KEPT = 16  # and an optimizer that so many dropped ones have followed is awaited nowhere


class StandIn(Protocol):
    """An exchange whose rank may join."""

    def prepare_to_join(self) -> None:
        """Finishes the work that this rank has begun."""

    def stand_in(self, event: str) -> None:
        """Repeats another rank's event without gradients; notes one event."""

    def end_join(self) -> None:
        """Abandons unfinished work after all ranks have joined."""


def process_set_of(key: str) -> int:
    """Returns the number of the process set whose exchange has this key."""
    return int(key.partition("/")[0])


class StepLog:
    """The events of one exchange.

    Attributes:
        key: key of the exchange; the same on all ranks.
        count: events so far; an event's number is the count before it.
    """

    def __init__(self, logs: StepLogs, key: str, exchange: StandIn) -> None:
        """Creates a log; only `StepLogs.open` calls it."""
        self.key = key
        self.count = 0
        self._logs = logs
        self._recent: deque[str] = deque(maxlen=_KEPT)
        self._exchange = weakref.ref(exchange)

    @property
    def exchange(self) -> StandIn | None:
        """The exchange of this log; None after the exchange was dropped."""
        return self._exchange()

    def note(self, event: str) -> None:
        """Notes the exchange's next action; see `GradientExchange.stand_in` for the events."""
        logs = self._logs
        with logs.lock:
            self._recent.append(event)
            self.count += 1
            if (report := logs.report) is not None:
                report(["step", self.key, self.count - 1, event])

    def forget(self) -> None:
        """Drops the kept events; a program may make optimizers without end."""
        self._recent.clear()

    def since(self, count: int) -> list[Message]:
        """Returns the kept events from number ``count`` on."""
        first = max(count, self.count - len(self._recent))
        recent = list(self._recent)[first - self.count :] if first < self.count else []
        return [["step", self.key, first + i, event] for i, event in enumerate(recent)]


class StepLogs:
    """The logs of all exchanges of this process.

    Attributes:
        lock: guards the logs; events are reported in order under it.
        report: sends events to the joined ranks; None while there are none.
        joined: this rank has joined.
    """

    def __init__(self) -> None:
        """Creates the object without logs."""
        self.lock = threading.Lock()
        self.report: Callable[[Message], None] | None = None
        self.joined = False
        self._logs: dict[str, StepLog] = {}
        self._made: Counter[str] = Counter()  # keys, by what all but their last part says
        self._makers: dict[str, threading.Thread] = {}  # by key, of those matched by names

    def next_key(self, process_set: int, names: str | None = None) -> str:
        """Returns the key of an exchange that is about to be made; the same on all ranks.

        Exchanges are matched by the order in which they are made. Threads have no order, so an
        exchange that is made on a thread of its own is matched by its names.

        Args:
            process_set: number of the set.
            names: what tells it from the exchanges of other threads; None: it is made on the
                thread on which all ranks make theirs in the same order.

        Raises:
            InvalidUsage: the exchange of another thread has the same names.
        """
        kind = f"{process_set}/" if names is None else f"{process_set}/{names}."
        with self.lock:
            me = threading.current_thread()
            for key, maker in self._makers.items():
                log = self._logs.get(key)
                alive = maker.is_alive() and log is not None and log.exchange is not None
                if names is not None and key.startswith(kind) and maker is not me and alive:
                    raise InvalidUsage(
                        "two threads have made optimizers whose parameters have the same names, so "
                        "nothing tells which rank's belong together: give each its own names "
                        "(named_parameters=[(f'critic.{name}', p) for name, p in "
                        "model.named_parameters()]), or make both on the thread that called init()"
                    )
            key = f"{kind}{self._made[kind]}"
            self._made[kind] += 1
            if names is not None:
                self._makers[key] = me
            return key

    def open(self, key: str, exchange: StandIn) -> StepLog:
        """Opens a log for a new exchange, whose key `next_key` has returned."""
        with self.lock:
            log = StepLog(self, key, exchange)
            self._logs[log.key] = log
            dead = [each for each in self._logs.values() if each.exchange is None]
            for each in dead[:-_DEAD_KEPT]:
                each.forget()
            return log

    def check_nobody_joined(self, what: str) -> None:
        """Raises InvalidUsage if a rank waits in ``join()``, where it cannot take part in this."""
        if self.report is not None:
            raise InvalidUsage(f"{what} while another rank waits in join(); do it before, or after")

    def get(self, key: str) -> StepLog | None:
        """Returns the log of a key; None if this process never had the exchange."""
        return self._logs.get(key)

    def exchanges(self) -> list[StandIn]:
        """Returns the live exchanges, in the order of their creation."""
        alive = [log.exchange for log in list(self._logs.values())]
        return [exchange for exchange in alive if exchange is not None]

    def counts(self) -> dict[str, int]:
        """Returns the number of events, by key."""
        return {key: log.count for key, log in self._logs.items()}

    def recent(self) -> list[Message]:
        """Returns all kept events of live exchanges."""
        with self.lock:
            logs = [log for log in self._logs.values() if log.exchange is not None]
            return [step for log in logs for step in log.since(0)]

    def start_reporting(self, counts: dict[str, int], report: Callable[[Message], None]) -> None:
        """Reports events from ``counts`` on, now and in future, because a rank has joined."""
        with self.lock:
            if self.joined:
                return
            self.report = report
            for log in self._logs.values():
                for step in log.since(counts.get(log.key, 0)):
                    report(step)

    def stop_reporting(self, joined: bool = False) -> None:
        """Stops reports: this rank waits in ``join()`` itself, or no rank does any more."""
        with self.lock:
            self.report = None
            self.joined = joined
