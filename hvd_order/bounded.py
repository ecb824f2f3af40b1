"""Calls of torch's store that know no limit of time, given one.

A store whose process is stopped still has its port open: the kernel takes the connection, and
torch waits for an answer for ever. That holds for `wait` with a timeout as well: when the time is
up it asks the store to forget the wait, and waits for that answer without a limit.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

__all__ = ["answer_s", "within"]

Answer = TypeVar("Answer")

_LONGEST_ANSWER_S = 20.0


def answer_s(timeout: timedelta) -> float:
    """How long a store may take to answer: milliseconds, unless its process is stopped.

    Args:
        timeout: of the job, HVD_ORDER_TIMEOUT.
    """
    return min(_LONGEST_ANSWER_S, timeout.total_seconds())


def within(seconds: float, call: Callable[[], Answer]) -> Answer:
    """What `call` returns, or raises.

    It runs on a thread of its own, which stays behind where it does not come back.

    Raises:
        TimeoutError: it has not come back in time.
    """
    done: queue.SimpleQueue[tuple[Answer | None, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            done.put((call(), None))
        except Exception as error:
            done.put((None, error))

    threading.Thread(target=run, name="hvd_order store", daemon=True).start()
    try:
        answer, error = done.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:g} s") from None
    if error is not None:
        raise error
    return answer  # type: ignore[return-value]
