"""Time limits for calls of torch's store that have none.

A store whose process is stopped still has its port open: the kernel accepts the connection, and
torch waits for an answer without limit. This holds for `wait` with a timeout as well: after the
timeout it asks the store to cancel the wait, and waits for that answer without limit.
"""

from __future__ import annotations

import atexit
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import TypeVar

__all__ = ["answer_s", "notice_times", "within"]

Answer = TypeVar("Answer")

_LONGEST_ANSWER_S = 20.0
_FIRST_NOTICE_S = 10.0
# A host that is cut off lets a connection attempt take 3 s more than its limit, and a second one
# begins within it.
_LONGEST_EXIT_S = 8.0
_left_behind: list[threading.Thread] = []


def answer_s(timeout: timedelta) -> float:
    """Returns the time limit for an answer of a store; milliseconds unless its process is stopped.

    Args:
        timeout: timeout of the job, HVD_ORDER_TIMEOUT.
    """
    return min(_LONGEST_ANSWER_S, timeout.total_seconds())


def notice_times(stall_warning: timedelta) -> Iterator[float]:
    """Yields the seconds after which a user is told what a long wait is for.

    Args:
        stall_warning: HVD_ORDER_STALL_WARNING.
    """
    every_s = stall_warning.total_seconds()
    if every_s > _FIRST_NOTICE_S:
        yield _FIRST_NOTICE_S
    yield from itertools.count(every_s, every_s)


def within(
    seconds: float,
    call: Callable[[], Answer],
    notices: Iterable[float] = (),
    notice: Callable[[], None] = lambda: None,
) -> Answer:
    """Returns or raises what `call` returns or raises.

    `call` runs on a thread of its own, which stays behind if `call` does not return.

    Args:
        notices: seconds after which `notice` is called while the call has not returned.

    Raises:
        TimeoutError: `call` has not returned in time.
    """
    done: queue.SimpleQueue[tuple[Answer | None, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            done.put((call(), None))
        except Exception as error:
            done.put((None, error))

    thread = threading.Thread(target=run, name="hvd_order store", daemon=True)
    thread.start()
    begin = time.monotonic()
    for after_s in itertools.takewhile(lambda after_s: after_s < seconds, notices):
        thread.join(max(0.0, begin + after_s - time.monotonic()))
        if not thread.is_alive():
            break
        notice()
    try:
        answer, error = done.get(timeout=max(0.0, begin + seconds - time.monotonic()))
    except queue.Empty:
        _left_behind.append(thread)
        raise TimeoutError(f"no answer within {seconds:g} s") from None
    if error is not None:
        raise error
    return answer  # type: ignore[return-value]


@atexit.register
def _await_threads() -> None:
    """Lets threads end that are about to.

    A thread that comes back from native code while the interpreter ends would abort the process.
    """
    until = time.monotonic() + _LONGEST_EXIT_S
    for thread in _left_behind:
        thread.join(max(0.0, until - time.monotonic()))
