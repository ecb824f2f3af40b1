"""The exchanges of this process, for events that concern all of them: the end, and a fork."""

from __future__ import annotations

import weakref
from typing import Protocol

__all__: list[str] = []


class Live(Protocol):
    """An exchange that may have updates outstanding."""

    @property
    def host(self) -> object:
        """The `EngineHost` that carries its gradients."""

    def end(self) -> None:
        """Finishes outstanding updates and leaves plain parameters; no step will follow."""

    def flush(self) -> None:
        """Finishes outstanding updates."""


_live: weakref.WeakSet[Live] = weakref.WeakSet()


def add(exchange: Live) -> None:
    """Takes in a new exchange, until it is dropped."""
    _live.add(exchange)


def live(host: object = None) -> list[Live]:
    """All of them, or those of one host: an earlier job's have no engine any more."""
    return [each for each in _live if host is None or each.host is host]


def forget_all() -> None:
    """In a forked child none of them is alive."""
    _live.clear()
