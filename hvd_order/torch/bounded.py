"""Calls of torch's store that know no limit of time, given one.

A store whose process is stopped still has its port open: the kernel takes the connection, and
torch waits for an answer for ever.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["within"]

Answer = TypeVar("Answer")


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
