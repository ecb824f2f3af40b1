"""Initial assignment of slices to servers, and the server that keeps each replica."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvd_order.base.errors import InvalidUsage

__all__ = ["Assignment", "assign", "replica_of"]


@dataclass(frozen=True)
class Assignment:
    """The owner of every slice.

    Attributes:
        version: counts the changes; the workers and servers of a job agree on it.
        owner: number of the owning server, by slice. Servers join and leave: numbers may have
            gaps.
    """

    version: int
    owner: tuple[int, ...]

    def loads(self, sizes: Sequence[int]) -> dict[int, int]:
        """Returns bytes by server, for servers that own slices."""
        loads: dict[int, int] = {}
        for server, size in zip(self.owner, sizes, strict=True):
            loads[server] = loads.get(server, 0) + size
        return loads

    def changed_to(self, owner: Sequence[int]) -> Assignment:
        """Returns the next version, with these owners."""
        return Assignment(self.version + 1, tuple(owner))


def assign(sizes: Sequence[int], servers: Sequence[int]) -> Assignment:
    """Returns the first assignment of a job: equal bytes, and neighbours on different servers.

    Largest first to the least loaded, as in the scheduling of jobs on machines; but among slices
    of similar size (within a factor of two) the first in consumption order goes first. Workers
    send the most urgent slices first: if neighbours shared a server, only that server would work
    while the other servers wait. Sorting by exact size would hardly improve the balance, but a
    server's slices would often be close together.

    Args:
        sizes: bytes by slice, in consumption order.
        servers: their numbers, in any order; not necessarily 0, 1, 2.

    Raises:
        InvalidUsage: there is no server, or a server is named twice.

    Source:
        Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17, 1969; the
        classes of sizes are ours.
    """
    if not servers or len(set(servers)) != len(servers):
        raise InvalidUsage(f"slices need servers, each named once, not {list(servers)}")
    loads = dict.fromkeys(servers, 0)
    owner = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i].bit_length(), i)):
        owner[i] = min(loads, key=lambda server: loads[server])
        loads[owner[i]] += sizes[i]
    return Assignment(0, tuple(owner))


def replica_of(
    assignment: Assignment,
    servers: Sequence[int],
    sizes: Sequence[int] | None = None,
    previous: Sequence[int] = (),
) -> tuple[int, ...]:
    """Returns the server that keeps the replica of each slice, by slice: never the owner.

    The slices of one owner are spread evenly over all other servers, so that no server has twice
    the work after a failure. Among servers with equal shares of this owner's slices, the one with
    the fewest replicas in total goes first.

    Args:
        assignment: the owners.
        servers: live servers; the owners are among them.
        sizes: bytes by slice; without it all slices count equally.
        previous: the replicas so far. Valid ones stay: moving a replica costs a copy.

    Raises:
        InvalidUsage: there are fewer than two servers.
    """
    if len(servers) < 2:
        raise InvalidUsage("a replica needs a second server; start one more, or no replicas")
    weights = sizes if sizes is not None else [1] * len(assignment.owner)
    shares: dict[int, dict[int, int]] = {
        owner: {other: 0 for other in servers if other != owner} for owner in assignment.owner
    }
    totals = dict.fromkeys(servers, 0)
    replicas: dict[int, int] = {}

    def keep(i: int, server: int) -> None:
        replicas[i] = server
        shares[assignment.owner[i]][server] += weights[i]
        totals[server] += weights[i]

    for i, server in enumerate(previous):
        if server in shares[assignment.owner[i]]:
            keep(i, server)
    rest = [i for i in range(len(assignment.owner)) if i not in replicas]
    for i in sorted(rest, key=lambda i: -weights[i]):
        keep(i, _least(shares[assignment.owner[i]], totals))
    return tuple(replicas[i] for i in range(len(assignment.owner)))


def _least(share: Mapping[int, int], totals: Mapping[int, int]) -> int:
    return min(share, key=lambda server: (share[server], totals[server]))
