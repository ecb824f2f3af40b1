"""Who is told where the time of steps goes: the account publishes, others subscribe.

Subscribers belong to the process, not to a job: they stay when an elastic job is formed anew.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hvd_order.base.account.step_stats import StepStats

__all__ = ["MOST_OPTIMIZERS", "StepReport", "on_report", "publish"]

MOST_OPTIMIZERS = 16
"""Whose newest reports a subscriber keeps: a program may make optimizers without end."""

_log = logging.getLogger("hvd_order")


@dataclass(frozen=True)
class StepReport:
    """The accounts of all ranks that one optimizer's gradients run over.

    Attributes:
        key: of the optimizer; alike on all ranks.
        mine: the account of this rank.
        everyone: the accounts of all ranks, by place in the process set.
        ranks: their ranks in the job, by place.
        hosts: the names of their hosts, by place.
    """

    key: str
    mine: StepStats
    everyone: Sequence[StepStats]
    ranks: Sequence[int]
    hosts: Sequence[str]


Subscriber = Callable[[StepReport], None]

_lock = threading.Lock()
_subscribers: dict[int, Subscriber] = {}  # guarded by _lock; in the order of their coming
_came = 0  # guarded by _lock


def on_report(callback: Subscriber) -> Callable[[], None]:
    """Calls ``callback`` with each report from now on; returns a function that ends this.

    About every ten steps, on a background thread of this process, on every rank. A callback that
    raises is told in one log line and is called again with the next report.
    """
    global _came
    with _lock:
        _came += 1
        ticket = _came
        _subscribers[ticket] = callback

    def remove() -> None:
        with _lock:
            _subscribers.pop(ticket, None)

    return remove


def publish(report: StepReport) -> None:
    """Gives a report to all subscribers, one after the other, on the calling thread."""
    with _lock:
        subscribers = list(_subscribers.values())
    for subscriber in subscribers:
        try:
            subscriber(report)
        except Exception as error:  # one subscriber's fault is not the others', nor the training's
            _log.warning("a subscriber to step reports failed: %r", error, exc_info=error)
