"""The collective queues of this process, one for each process set that it belongs to."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch.distributed as dist

from hvd_order.c10d.job import process
from hvd_order.c10d.requests.collective_queue import CollectiveQueue
from hvd_order.c10d.requests.negotiation import Negotiation

__all__ = [
    "all_queues",
    "close_queue",
    "collective_queue",
    "negotiation",
    "open_queue",
    "queue_of",
]

_lock = threading.Lock()  # guards the fields below
_queues: dict[int, CollectiveQueue] = {}  # by process set
_queues_context: process.ProcessContext | None = None
_negotiation: Negotiation | None = None


def collective_queue(process_set_id: int = 0) -> CollectiveQueue:
    """Returns the queue of a process set (0: all ranks) of the current ``init()``.

    Raises:
        NotInitialized: before ``init()``.
        InvalidUsage: this process was forked from the rank.
    """
    global _queues_context, _negotiation
    context = process.current()
    context.check_not_forked("a collective operation")
    with _lock:
        if _queues_context is not context:
            _queues.clear()
            _queues_context = context
            context.on_shutdown(_close_all)
            alone = context.size == 1
            _negotiation = None if alone else Negotiation(context)
            group = None if alone else context.functions_group
            ranks = range(context.size)
            _queues[0] = CollectiveQueue(context, 0, group, ranks, _negotiation)
        return _queues[process_set_id]


def negotiation() -> Negotiation | None:
    """Returns the negotiation of the current ``init()``; None in a job of one process."""
    collective_queue()
    return _negotiation


def all_queues() -> list[CollectiveQueue]:
    """Returns the queues of the process sets that this process belongs to."""
    collective_queue()
    with _lock:
        return list(_queues.values())


def open_queue(process_set_id: int, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
    """Makes the queue of another process set; every rank of the job calls it, member or not."""
    collective_queue()
    context = process.current()
    with _lock:
        if context.rank not in ranks:
            if _negotiation is not None:
                _negotiation.add_set(process_set_id, ranks, None)
            return
        alone = len(ranks) == 1
        _queues[process_set_id] = CollectiveQueue(
            context,
            process_set_id,
            None if alone else group,
            ranks,
            None if alone else _negotiation,
        )


def close_queue(process_set_id: int) -> None:
    """Ends the queue of a process set that is being removed; every rank of the job calls it."""
    with _lock:
        closing = _queues.pop(process_set_id, None)
    if _negotiation is not None:
        _negotiation.remove_set(process_set_id)
    if closing is not None:
        closing.close()


def queue_of(handle: int) -> CollectiveQueue:
    """Returns the queue of a handle; the queue of all ranks for an unknown handle."""
    everybody = collective_queue()
    with _lock:
        return next((one for one in _queues.values() if one.knows(handle)), everybody)


def _close_all() -> None:
    with _lock:
        everyone = list(_queues.values())
    for one in everyone:
        one.close()
    if _negotiation is not None:
        _negotiation.close()
