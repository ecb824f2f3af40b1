"""Which updates are outstanding, and what makes up for them: whoever reads a variable eagerly.

A traced function reads variables through handles that it has captured, which nobody sees. So those
of Keras that do (testing, predicting) ask for `flush` by themselves (keras/fit.py).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import tensorflow as tf

from hvd_order.tensorflow.gradients.step import tensorflow_variable
from hvd_order.tensorflow.ops import process

__all__ = ["Flushable", "busy", "flush", "outstanding", "watch"]


class Flushable(Protocol):
    """What may have updates outstanding."""

    def flush(self) -> None:
        """Applies them."""


_log = logging.getLogger("hvd_order")

outstanding: list[Flushable] = []
_lock = threading.RLock()  # guards the next
_busy = 0


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """While a step or a flush runs: whatever reads variables meanwhile is part of it."""
    global _busy
    with _lock:
        _busy += 1
    try:
        yield
    finally:
        with _lock:
            _busy -= 1


def flush() -> None:
    """Applies all outstanding updates, waiting for their gradients.

    Needed only before a function of your own that was traced with ``tf.function`` reads
    variables between two steps: everything else does it by itself.

    Raises:
        HorovodInternalError: a rank is gone or late; the variables have to be restored.
    """
    if _busy:
        return
    for one in list(outstanding):
        one.flush()


def watch(variables: Iterable[Any]) -> None:
    """Has eager reads and writes of these variables wait for outstanding updates, from now on."""
    for source in variables:
        variable = tensorflow_variable(source)
        kind: Any = type(variable)
        if isinstance(variable, tf.Variable) and not getattr(kind, "_hvd_watched", False):
            variable.__class__ = _watched_kind(kind)


@functools.cache
def _watched_kind(kind: Any) -> Any:
    """A subclass whose handle, which every eager operation asks for, is given out after a flush."""

    def handle(self: Any) -> Any:
        if outstanding and tf.executing_eagerly():
            flush()
        return kind.handle.fget(self)

    names = {
        "handle": property(handle, doc=kind.handle.__doc__),
        "_hvd_watched": True,
        "__doc__": kind.__doc__,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
    return type(kind)(kind.__name__, (kind,), names)


def _forget() -> None:
    if outstanding:  # another framework's shutdown(), or the end of the program
        _log.warning("the updates of the last step are not applied any more")
        outstanding.clear()


process.before_shutdown(flush)
process.at_end(_forget)
