"""The collective queues of this process, one for each process set that it belongs to."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch.distributed as dist

from hvd_order.engine.job.job import Job, current
from hvd_order.engine.requests.collective_queue import CollectiveQueue
from hvd_order.engine.requests.negotiation import Negotiation

__all__ = [
    "all_queues",
    "close_queue",
    "collective_queue",
    "negotiation",
    "open_queue",
    "queue_of",
]


class Queues:
    """The queues of one job, and the negotiation that they share: a part of the `Job`.

    Attributes:
        negotiation: None in a job of one process without servers.
    """

    def __init__(self, job: Job) -> None:
        job.on_shutdown(self._close)
        self._job = job
        self._lock = threading.Lock()  # guards the queues
        alone = job.is_alone
        self.negotiation = None if alone else Negotiation(job)
        group = None if alone else job.functions_group
        ranks = range(job.size)
        self._by_set = {0: CollectiveQueue(job, 0, group, ranks, self.negotiation)}

    def of_set(self, process_set_id: int) -> CollectiveQueue:
        """Returns the queue of a process set that this process belongs to."""
        with self._lock:
            return self._by_set[process_set_id]

    def all(self) -> list[CollectiveQueue]:
        """Returns all queues, that of all ranks first."""
        with self._lock:
            return list(self._by_set.values())

    def open(self, process_set_id: int, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
        """Makes the queue of another process set; every rank of the job calls it."""
        with self._lock:
            if self._job.rank not in ranks:
                if self.negotiation is not None:
                    self.negotiation.add_set(process_set_id, ranks, None)
                return
            alone = len(ranks) == 1
            self._by_set[process_set_id] = CollectiveQueue(
                self._job,
                process_set_id,
                None if alone else group,
                ranks,
                None if alone else self.negotiation,
            )

    def close_set(self, process_set_id: int) -> None:
        """Ends the queue of a process set that is being removed."""
        with self._lock:
            closing = self._by_set.pop(process_set_id, None)
        if self.negotiation is not None:
            self.negotiation.remove_set(process_set_id)
        if closing is not None:
            closing.close()

    def _close(self) -> None:
        for one in self.all():
            one.close()
        if self.negotiation is not None:
            self.negotiation.close()


def _queues() -> Queues:
    job = current()
    job.check_not_forked("a collective operation")
    return job.part(Queues)


def collective_queue(process_set_id: int = 0) -> CollectiveQueue:
    """Returns the queue of a process set (0: all ranks) of the current ``init()``.

    Raises:
        NotInitialized: before ``init()``.
        InvalidUsage: this process was forked from the rank.
    """
    return _queues().of_set(process_set_id)


def negotiation() -> Negotiation | None:
    """Returns the negotiation of the current ``init()``; None if the job is alone."""
    return _queues().negotiation


def all_queues() -> list[CollectiveQueue]:
    """Returns the queues of the process sets that this process belongs to."""
    return _queues().all()


def open_queue(process_set_id: int, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
    """Makes the queue of another process set; every rank of the job calls it, member or not."""
    _queues().open(process_set_id, group, ranks)


def close_queue(process_set_id: int) -> None:
    """Ends the queue of a process set that is being removed; every rank of the job calls it."""
    _queues().close_set(process_set_id)


def queue_of(handle: int) -> CollectiveQueue:
    """Returns the queue of a handle; the queue of all ranks for an unknown handle."""
    queues = _queues()
    return next((one for one in queues.all() if one.knows(handle)), queues.of_set(0))
