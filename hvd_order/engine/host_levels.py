"""Encoded sums in two levels where several ranks share a host: exact within it, codes between."""

from __future__ import annotations

import logging
import socket
from collections import Counter
from collections.abc import Sequence

from hvd_order._native import _torch as native
from hvd_order.engine.model_channel import ModelChannel

__all__: list[str] = []

_log = logging.getLogger("hvd_order")

Place = tuple[str, int, int]
"""Host name, local rank and local size of a rank."""


def hosts_of(places: Sequence[Place]) -> list[int]:
    """The number of each rank's host.

    Several hosts may have one name, as emulated ones do. Then a rank belongs to the first of them
    whose ranks so far are as many as its local rank.
    """
    members: list[tuple[str, int, int]] = []  # name, size and ranks so far, by host
    hosts = []
    for name, local_rank, local_size in places:
        place = (name, local_size, local_rank)
        if local_rank == 0 or place not in members:  # not there: it is taken to be alone
            host = len(members)
            members.append((name, local_size, 1 if local_rank == 0 else 0))
        else:
            host = members.index(place)
            members[host] = (name, local_size, local_rank + 1)
        hosts.append(host)
    return hosts


def use_host_levels(channel: ModelChannel) -> None:
    """Lets encoded sums travel in two levels if that sends fewer bytes between hosts.

    A process set that does not have all ranks keeps one level: groups are made by all ranks.
    Collective; the first call counts. Nothing may be in flight.
    """
    host = channel.host
    job, transport = host.job, host.transport
    if (
        host.process_set != 0
        or host.knows_hosts
        or host.size == 1
        or not isinstance(transport, native.C10dTransport)
    ):
        return
    host.knows_hosts = True
    mine = (socket.gethostname(), job.local_rank, job.local_size)
    hosts = hosts_of(channel.gather("hosts", mine))
    ranks = Counter(hosts)
    if len(ranks) == 1 or len(ranks) == len(hosts):
        return
    between = job.new_group("between hosts", None, job.patience, None, "at once")
    own = {}
    for each in ranks:
        members = [rank for rank, other in enumerate(hosts) if other == each]
        for purpose in ("scatter", "gather") if len(members) > 1 else ():
            group = job.new_group(purpose, None, job.patience, members, "at once")
            if each == hosts[host.rank]:
                own[purpose] = group
    transport.set_hosts(hosts, between, own.get("scatter"), own.get("gather"))
    if host.rank == 0:
        _log.debug("encoded sums travel in two levels: ranks of %d hosts %s", len(ranks), hosts)
