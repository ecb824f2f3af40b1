"""What wings add to the core: a wing's module registers it when a user's choice first asks for it.

The core imports no wing. Where it can do something in several ways, it has a `Registry`; a way that
is not its own is in a module of the table below, which is loaded by name.
"""

from __future__ import annotations

import importlib
from typing import Generic, TypeVar

__all__: list[str] = []

T = TypeVar("T")

# By what is registered, and under which name.
MODULES = {
    ("transport", "ps"): "hvd_order.servers.worker.client",
    ("job service", "servers"): "hvd_order.servers.launch.job_servers",
    ("use of sums", "ps"): "hvd_order.servers.worker.server_update",
    ("watcher", "metrics"): "hvd_order.watch.metrics.exporter",
    ("watcher", "channel"): "hvd_order.watch.channel.rank_side",
}


class Registry(Generic[T]):
    """The ways to do one thing in the core that wings add, by name."""

    def __init__(self, what: str) -> None:
        """Starts empty; ``what`` is registered here, as `MODULES` calls it."""
        self._what = what
        self._registered: dict[str, T] = {}

    def register(self, name: str, added: T) -> None:
        """Adds a way; called by the wing's module when it is loaded."""
        self._registered[name] = added

    def find(self, name: str) -> T:
        """Returns what a wing has registered under a name; loads the module that does so."""
        if name not in self._registered:
            importlib.import_module(MODULES[self._what, name])
        return self._registered[name]
