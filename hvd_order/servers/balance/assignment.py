"""Initial assignment of slices to servers, and the server that keeps each replica."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hvd_order.base.errors import InvalidUsage

__all__ = [
    "ASSIGNMENTS",
    "Assignment",
    "ServedSlice",
    "assign",
    "even",
    "hashed",
    "mxnet",
    "replica_of",
    "round_robin",
]

_MXNET_WHOLE = 10**6  # elements; smaller tensors go whole to one server


@dataclass(frozen=True)
class ServedSlice:
    """Properties of a slice that policies may use; slices are numbered in consumption order.

    Attributes:
        name: unique, the same on all workers.
        tensor: the tensor that the slice is cut from; the first if several tensors share the
            slice.
        size_bytes: size of one worker's push.
        elements: the same size in elements of the gradient's type.
    """

    name: str
    tensor: str
    size_bytes: int
    elements: int


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


def even(slices: Sequence[ServedSlice], servers: Sequence[int]) -> tuple[int, ...]:
    """Assigns equal bytes, with neighbours in consumption order on different servers.

    Largest first to the least loaded, as in the scheduling of jobs on machines; but among slices
    of similar size (within a factor of two) the first in consumption order goes first. Workers
    send the most urgent slices first: if neighbours shared a server, only that server would work
    while the other servers wait. Sorting by exact size would hardly improve the balance, but a
    server's slices would often be close together.

    Source:
        Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17, 1969; the
        classes of sizes are ours.
    """
    loads = dict.fromkeys(servers, 0)
    owner = [0] * len(slices)
    for i in sorted(range(len(slices)), key=lambda i: (-slices[i].size_bytes.bit_length(), i)):
        owner[i] = min(loads, key=lambda server: loads[server])
        loads[owner[i]] += slices[i].size_bytes
    return tuple(owner)


def round_robin(slices: Sequence[ServedSlice], servers: Sequence[int]) -> tuple[int, ...]:
    """Assigns whole tensors in turn, regardless of size, as TensorFlow's servers do."""
    numbers: dict[str, int] = {}
    for each in slices:
        numbers.setdefault(each.tensor, len(numbers))
    return tuple(servers[numbers[each.tensor] % len(servers)] for each in slices)


def hashed(slices: Sequence[ServedSlice], servers: Sequence[int]) -> tuple[int, ...]:
    """Assigns by a hash of the slice's name, similar to BytePS, which hashes the slice's number.

    The hash is the same in every process and version of Python.
    """
    return tuple(_by_hash(each.name, servers) for each in slices)


def mxnet(slices: Sequence[ServedSlice], servers: Sequence[int]) -> tuple[int, ...]:
    """Assigns small tensors whole to one hashed server, and each large one in equal parts to all.

    Source:
        MXNet's KVStore as P3 describes it (arXiv 1905.03960): tensors of fewer than a million
            elements are small. A part is a run of slices here, so it is equal to within a slice.
    """
    elements: dict[str, int] = {}
    for each in slices:
        elements[each.tensor] = elements.get(each.tensor, 0) + each.elements
    before = dict.fromkeys(elements, 0)
    owner: list[int] = []
    for each in slices:
        whole = elements[each.tensor]
        if whole < _MXNET_WHOLE:
            owner.append(_by_hash(each.tensor, servers))
        else:
            middle = before[each.tensor] + each.elements // 2
            owner.append(servers[min(middle * len(servers) // whole, len(servers) - 1)])
        before[each.tensor] += each.elements
    return tuple(owner)


Policy = Callable[[Sequence[ServedSlice], Sequence[int]], tuple[int, ...]]

ASSIGNMENTS: dict[str, Policy] = {
    "even": even,
    "hash": hashed,
    "mxnet": mxnet,
    "round_robin": round_robin,
}
"""All policies by name. A new policy is a function and a line here."""


def assign(name: str, slices: Sequence[ServedSlice], servers: Sequence[int]) -> Assignment:
    """Returns the first assignment of a job, by the named policy.

    Args:
        name: name of the policy.
        slices: in consumption order.
        servers: their numbers, in any order; not necessarily 0, 1, 2.

    Raises:
        InvalidUsage: the policy does not exist, there is no server, or a server is named twice.
    """
    if name not in ASSIGNMENTS:
        raise InvalidUsage(f"no assignment is called {name!r}; there are: {', '.join(ASSIGNMENTS)}")
    if not servers or len(set(servers)) != len(servers):
        raise InvalidUsage(f"slices need servers, each named once, not {list(servers)}")
    return Assignment(0, ASSIGNMENTS[name](slices, servers))


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


def _by_hash(name: str, servers: Sequence[int]) -> int:
    digest = hashlib.blake2s(name.encode(), digest_size=8).digest()
    return servers[int.from_bytes(digest, "big") % len(servers)]
