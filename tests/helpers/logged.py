"""What is logged while a test looks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["logged"]


@contextmanager
def logged(
    logger: str = "hvd_order", level: int = logging.INFO, slow_ranks: bool = False
) -> Iterator[list[str]]:
    """The messages of a logger from this level on, as they come.

    Args:
        slow_ranks: also those about ranks that hold up the others: a busy machine has some.
    """
    messages: list[str] = []
    handler = logging.Handler(level)

    def take(record: logging.LogRecord) -> None:
        message = record.getMessage()
        if slow_ranks or " up the other ranks" not in message:
            messages.append(message)

    handler.emit = take  # type: ignore[method-assign]
    found = logging.getLogger(logger)
    before = found.level
    found.addHandler(handler)
    found.setLevel(logging.INFO)
    try:
        yield messages
    finally:
        found.removeHandler(handler)
        found.setLevel(before)
