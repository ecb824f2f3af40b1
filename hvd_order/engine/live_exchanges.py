"""The gradient exchanges of this process, for events that concern all of them: end and fork."""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

__all__: list[str] = []


class Live(Protocol):
    """A gradient exchange that may have deferred updates."""

    @property
    def host(self) -> object:
        """The `EngineHost` that carries its gradients."""

    @property
    def trained_on(self) -> threading.Thread | None:
        """The thread that took its last step; None: it has taken none."""

    def end(self) -> None:
        """Applies deferred updates and leaves plain parameters; no step follows."""

    def flush(self) -> None:
        """Applies deferred updates."""


_live: weakref.WeakSet[Live] = weakref.WeakSet()


def add(exchange: Live) -> None:
    """Adds a new exchange; it is removed when it is garbage-collected."""
    _live.add(exchange)


def live(host: object = None) -> list[Live]:
    """Returns all exchanges, or those of one host; exchanges of an earlier job have no engine."""
    return [each for each in _live if host is None or each.host is host]


def trained_elsewhere(host: object) -> bool:
    """Whether another thread trains, so that gradients may come at any time."""
    me = threading.current_thread()
    threads = [each.trained_on for each in live(host)]
    return any(each is not None and each is not me and each.is_alive() for each in threads)


def forget_all() -> None:
    """Forgets all exchanges: none of them is alive in a forked child."""
    _live.clear()
