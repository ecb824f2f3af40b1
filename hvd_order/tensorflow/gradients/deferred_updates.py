"""Deferred updates, and their application before an eager read of a variable.

A traced function reads variables through captured handles, which cannot be intercepted. So Keras'
functions that do this (testing, predicting) call `flush` first (keras/fit.py).
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

__all__ = ["Flushable", "busy", "flush", "pending", "watch"]


class Flushable(Protocol):
    """An object that may have deferred updates."""

    def flush(self) -> None:
        """Applies the deferred updates."""


_log = logging.getLogger("hvd_order")

pending: list[Flushable] = []


class _Running:
    """Counts running steps and flushes of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards `count`
        self.count = 0

    def add(self, change: int) -> None:
        with self._lock:
            self.count += change


_running = _Running()


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """Marks a running step or flush: reads of variables during it belong to it."""
    _running.add(1)
    try:
        yield
    finally:
        _running.add(-1)


def flush() -> None:
    """Applies all deferred updates, waiting for their gradients.

    Needed only before a function of your own that was traced with ``tf.function`` reads
    variables between two steps. All other reads flush automatically.

    Raises:
        HorovodInternalError: a rank is gone or late; the variables have to be restored.
    """
    if _running.count:
        return
    for one in list(pending):
        one.flush()


def watch(variables: Iterable[Any]) -> None:
    """Makes eager reads and writes of these variables apply deferred updates first."""
    for source in variables:
        variable = tensorflow_variable(source)
        kind: Any = type(variable)
        if isinstance(variable, tf.Variable) and not getattr(kind, "_hvd_watched", False):
            variable.__class__ = _watched_kind(kind)


@functools.cache
def _watched_kind(kind: Any) -> Any:
    """A subclass that flushes before it returns its handle, which every eager operation uses."""

    def handle(self: Any) -> Any:
        if pending and tf.executing_eagerly():
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
    if pending:  # another framework's shutdown(), or the end of the program
        _log.warning("the updates of the last step are not applied any more")
        pending.clear()


process.before_shutdown(flush)
process.at_end(_forget)
