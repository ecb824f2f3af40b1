"""What is logged while a test looks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["logged"]


@contextmanager
def logged(logger: str = "hvd_order", level: int = logging.INFO) -> Iterator[list[str]]:
    """The messages of a logger from this level on, as they come."""
    messages: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    found = logging.getLogger(logger)
    before = found.level
    found.addHandler(handler)
    found.setLevel(logging.INFO)
    try:
        yield messages
    finally:
        found.removeHandler(handler)
        found.setLevel(before)
