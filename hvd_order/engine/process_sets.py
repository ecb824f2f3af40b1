"""Process sets: the processes that a collective runs over, all of them or a registered set."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from hvd_order.base.errors import InvalidUsage
from hvd_order.base.process_set import RankSet
from hvd_order.engine import timeline
from hvd_order.engine.account import watchers
from hvd_order.engine.engine_host import close_host, open_groups
from hvd_order.engine.job import process
from hvd_order.engine.job.job import Job
from hvd_order.engine.requests.collective_queue import CollectiveQueue
from hvd_order.engine.requests.queues import close_queue, collective_queue, open_queue
from hvd_order.engine.requests.request import Request

__all__ = [
    "ProcessSet",
    "add_process_set",
    "check_root",
    "global_process_set",
    "init",
    "queue_for",
    "remove_process_set",
    "require_registered",
]


class ProcessSet(RankSet):
    """A set of ranks; usable after it was passed to `init` or `add_process_set`."""

    @staticmethod
    def _own_rank() -> int:
        return process.rank()

    def __str__(self) -> str:
        ranks = self.ranks if self is not global_process_set or process.is_initialized() else "all"
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={ranks}, mpi_comm=None)"


class _GlobalProcessSet(ProcessSet):
    def __init__(self) -> None:
        super().__init__([])
        self.process_set_id = 0

    @property
    def ranks(self) -> list[int]:
        return list(range(process.size()))


global_process_set: ProcessSet = _GlobalProcessSet()


class _Sets:
    """The process sets that are registered in one job: a part of the `Job`.

    Attributes:
        registered: the sets by number, without that of all ranks.
        groups: their process groups.
        next_id: number of the next set, the same on every rank.
    """

    def __init__(self, job: Job) -> None:
        self.registered: dict[int, ProcessSet] = {}
        self.groups: dict[int, dist.ProcessGroup] = {}
        self.next_id = 1
        job.on_shutdown(self._forget)

    def _forget(self) -> None:
        for process_set in self.registered.values():
            process_set.process_set_id = None


def _sets() -> _Sets:
    return process.current().part(_Sets)


def init(comm: object = None, process_sets: str | Sequence[ProcessSet] | None = None) -> None:
    """Joins the job; every rank must call it before any other function.

    Reads the configuration from the environment. If the program has initialised
    ``torch.distributed``, `init` joins that job, and `shutdown` leaves it running. Otherwise the
    launcher's variables define the ranks; CUDA tensors use NCCL when every rank of every host has
    a device of its own, and all other tensors use Gloo. A second call without a ``shutdown()`` in
    between does nothing, as in Horovod.

    Args:
        comm: only None (all processes); Horovod's lists of ranks and MPI communicators are not
            supported.
        process_sets: sets to register, the same on every rank. "dynamic" is accepted: sets can
            always be added later.

    Raises:
        InvalidUsage: other arguments, an invalid knob, or contradictory launcher variables.
        TransferTimeout: not all ranks arrived within ``HVD_ORDER_TIMEOUT``; names the missing
            ones.
    """
    if isinstance(process_sets, str) and process_sets.lower() != "dynamic":
        raise InvalidUsage(f"process_sets is {process_sets!r}; expected a list or 'dynamic'")
    if process.is_initialized():
        return
    process.init(comm)
    _sets()  # before the queues and engines, so that numbers last until these have ended
    collective_queue()  # rank 0 must receive requests even if it makes none itself
    timeline.start_if_asked()
    for process_set in process_sets or [] if not isinstance(process_sets, str) else []:
        add_process_set(process_set)
    watchers.begin(process.current())


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Registers a set of ranks. Collective: every rank of the job calls it, member or not.

    Returns:
        The set, ready for use on its members.

    Raises:
        ValueError: a set of these ranks exists already, or a rank does not exist.
        ModelMismatch: another rank adds different ranks (raised on every rank).
    """
    job = process.current()
    sets = _sets()
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    ranks = process_set.ranks
    if any(known.ranks == ranks for known in (global_process_set, *sets.registered.values())):
        raise ValueError(f"Attempted to add a duplicate process set: {process_set}")
    if len(set(ranks)) != len(ranks) or not ranks or not 0 <= ranks[0] <= ranks[-1] < job.size:
        raise ValueError(f"a process set needs different ranks of 0 to {job.size - 1}; got {ranks}")
    _agree(f"add_process_set {ranks}")
    number = sets.next_id
    group = job.new_group(f"process_set_{number}", ranks=ranks)
    if len(ranks) > 1:
        open_groups(number, ranks)
    process_set.process_set_id = number
    sets.next_id += 1
    sets.registered[number] = process_set
    sets.groups[number] = group
    open_queue(number, group, ranks)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Unregisters a set. Collective: every rank of the job calls it; nothing may be in flight.

    Returns:
        Whether the set was registered; the set of all ranks cannot be removed.
    """
    number = process_set.process_set_id
    if number is None or not process.is_initialized():
        return False
    sets = _sets()
    if sets.registered.get(number) is not process_set:
        return False
    _agree(f"remove_process_set {process_set.ranks}")
    del sets.registered[number]
    process_set.process_set_id = None
    close_queue(number)
    close_host(number)
    process.current().drop_group(sets.groups.pop(number))
    return True


def _agree(line: str) -> None:
    """Checks that all ranks make the same change; otherwise raises on all of them."""
    queue = collective_queue()
    name = queue.next_name("process_sets")
    queue.run(Request(name, [line], lambda group: None, lambda: None, torch.device("cpu")))


def require_registered(process_set: ProcessSet) -> int:
    """Returns the number of a process set.

    Raises:
        NotInitialized: before ``init()``.
        InvalidUsage: the set is not registered.
    """
    sets = _sets()  # "not initialized" takes precedence over other errors
    number = process_set.process_set_id
    if number is None or (number and sets.registered.get(number) is not process_set):
        raise InvalidUsage(
            f"{process_set} is not registered; pass it to hvd.init() or hvd.add_process_set()"
        )
    return number


def queue_for(process_set: ProcessSet) -> CollectiveQueue:
    """Returns the queue of a process set.

    Raises:
        NotInitialized: before ``init()``.
        InvalidUsage: the set is not registered, or this process does not belong to it.
    """
    number = require_registered(process_set)
    rank = process.rank()
    if rank not in process_set.ranks:
        raise InvalidUsage(f"rank {rank} does not belong to {process_set}; only members may call")
    return collective_queue(number)


def check_root(root_rank: int, process_set: ProcessSet) -> None:
    """Raises InvalidUsage unless the rank belongs to the set."""
    if root_rank not in process_set.ranks:
        raise InvalidUsage(
            f"root_rank is {root_rank}, the ranks that take part are {process_set.ranks}"
        )
