"""Which processes a collective runs over: all of them, or a registered set."""

from __future__ import annotations

from collections.abc import Sequence

from hvd_order.base.errors import InvalidUsage
from hvd_order.base.process_set import RankSet
from hvd_order.tensorflow.backend.interface import started_backend

__all__ = [
    "ProcessSet",
    "add_process_set",
    "forget_all",
    "global_process_set",
    "members",
    "number_of",
    "remove_process_set",
]


class ProcessSet(RankSet):
    """A set of ranks; usable once it was given to ``init`` or `add_process_set`."""

    @staticmethod
    def _own_rank() -> int:
        return started_backend().rank()

    def __str__(self) -> str:
        ranks = "all" if self is global_process_set else self.ranks
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={ranks}, mpi_comm=None)"


class _SetOfAllRanks(ProcessSet):
    def __init__(self) -> None:
        super().__init__([])
        self.process_set_id = 0

    @property
    def ranks(self) -> list[int]:
        return list(range(started_backend().size()))


global_process_set: ProcessSet = _SetOfAllRanks()

_registered: dict[int, ProcessSet] = {}


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Registers a set of ranks. Collective: every rank of the job calls it, member or not.

    Returns:
        The set, ready for use on its members.

    Raises:
        ValueError: there is a set of these ranks already, or a rank does not exist.
        ModelMismatch: another rank adds other ranks (raised on every rank).
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    process_set.process_set_id = started_backend().add_process_set(process_set.ranks)
    _registered[process_set.process_set_id] = process_set
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a process set. Collective: every rank of the job calls it; nothing may be in flight.

    Returns:
        Whether it was registered; the set of all ranks stays.
    """
    number = process_set.process_set_id
    if number is None or _registered.get(number) is not process_set:
        return False
    removed = started_backend().remove_process_set(number)
    del _registered[number]
    process_set.process_set_id = None
    return removed


def forget_all() -> None:
    """Forgets all numbers at the end of the job."""
    for process_set in _registered.values():
        process_set.process_set_id = None
    _registered.clear()


def number_of(process_set: ProcessSet) -> int:
    """The number of a process set that this process belongs to.

    Raises:
        NotInitialized: before ``init()``.
        InvalidUsage: the set is not registered, or this process is no member.
    """
    rank = started_backend().rank()
    number = process_set.process_set_id
    if number is None or (number and _registered.get(number) is not process_set):
        raise InvalidUsage(
            f"{process_set} is not registered; pass it to hvd.init() or hvd.add_process_set()"
        )
    if rank not in process_set.ranks:
        raise InvalidUsage(f"rank {rank} does not belong to {process_set}; only members may call")
    return number


def members(number: int) -> list[int]:
    """The ranks of the process set with this number."""
    return (global_process_set if number == 0 else _registered[number]).ranks
