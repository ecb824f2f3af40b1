"""The log of hvd_order, for programs that set up no logging of their own.

All modules write to the logger ``hvd_order``. Where the program has given the root logger a
handler, for example by ``logging.basicConfig()``, messages go there alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys

__all__ = ["begin", "set_rank"]


class _Handler(logging.Handler):
    """Writes to standard error, with time and rank."""

    def __init__(self) -> None:
        super().__init__()
        self.rank = os.environ.get("RANK", "")

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers:
            return  # the program's own handlers have it
        rank = f" rank {self.rank}" if self.rank else ""
        when = _TIME.formatTime(record, "%H:%M:%S")
        level = record.levelname.lower()
        with contextlib.suppress(OSError, ValueError):  # closed, or nobody reads it
            sys.stderr.write(f"hvd_order {when}{rank} {level}: {record.getMessage()}\n")
            sys.stderr.flush()


_TIME = logging.Formatter()
_handler = _Handler()


def begin(level: str | None) -> None:
    """Writes messages from `level` on; may be called again.

    Args:
        level: ``debug``, ``info``, ``warning`` or ``error``; None: as the program has set it.
    """
    log = logging.getLogger("hvd_order")
    if _handler not in log.handlers:
        log.addHandler(_handler)
    if level is not None:
        log.setLevel(level.upper())


def set_rank(rank: int) -> None:
    """Sets the rank that messages name."""
    _handler.rank = str(rank)
