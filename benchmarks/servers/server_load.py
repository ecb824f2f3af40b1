"""What each parameter server owns, as a worker sees it."""

from __future__ import annotations

from collections import Counter

from hvd_order.engine import engine_host
from hvd_order.servers.worker.client import servers_of


def slices_of_servers() -> dict[int, int]:
    """How many of the newest model's slices each server owns; empty before they are cut."""
    host = engine_host.running_host()
    servers = None if host is None else servers_of(host)
    if host is None or servers is None or not host.models:
        return {}
    places = servers.transport.places(max(host.models))
    return dict(sorted(Counter(owner for owner, _ in places).items()))
