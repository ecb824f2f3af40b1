"""``join()``: a rank without more data waits for the other ranks, and takes part with zeros."""

from __future__ import annotations

import gc
import queue
import time
import warnings

import torch

from hvd_order.base import errors
from hvd_order.base.errors import HorovodInternalError, InvalidUsage, TransferTimeout
from hvd_order.engine.job import process
from hvd_order.engine.job.job import Job
from hvd_order.engine.job.message_forms import Message
from hvd_order.engine.requests.negotiation import Negotiation
from hvd_order.engine.requests.queues import all_queues, negotiation
from hvd_order.engine.requests.step_log import process_set_of

__all__ = ["join"]


def join(device: int = -1) -> int:
    """Declares that this rank has no more data, and waits until all ranks have done so.

    Until then this rank takes part in the other ranks' work: with zeros in allreduce,
    reducescatter and the gradients of ``DistributedOptimizer``, without rows in allgather.
    Averages still divide by the number of all ranks. Any other collective, such as `broadcast`,
    raises on the ranks that call it. The parameters of this rank stay as they are; the returned
    rank has the latest, so training usually continues with ``broadcast_parameters(...,
    root_rank=join())``.

    Args:
        device: the CUDA device for zeros; -1: the current one, used only where the other ranks'
            tensors are in CUDA memory.

    Returns:
        The rank that joined last, the same on all ranks.

    Raises:
        NotInitialized: before ``init()``.
        HorovodInternalError: another rank died, shut down, or failed.
        TransferTimeout: no message arrived from the other ranks for ``HVD_ORDER_TIMEOUT``.

    Warns:
        RuntimeWarning: no message arrived from them for ``HVD_ORDER_STALL_WARNING``.
    """
    job = process.current()
    ranks = negotiation()
    if ranks is None:
        return job.rank
    gc.collect()  # the set of live exchanges must not depend on each rank's garbage collector
    for exchange in ranks.steps.exchanges():
        exchange.prepare_to_join()
    queues = all_queues()
    cuda = torch.cuda.is_available()
    for one in queues:
        one.begin_join((torch.cuda.current_device() if device < 0 else device) if cuda else None)
    ranks.steps.stop_reporting(joined=True)
    unnamed = {str(one.number): one.unnamed for one in queues}
    ranks.send(["join", ranks.steps.counts(), ranks.steps.recent(), unnamed])
    early: dict[tuple[str, int], str] = {}
    what, *rest = _next(ranks, job)
    sets = {one.number for one in queues}
    while what == "step":
        key, number, event = rest
        if process_set_of(key) in sets:
            _stand_in(ranks, early, key, number, event)
        what, *rest = _next(ranks, job)
    if what == "failed":
        _, kind, text = rest
        error: HorovodInternalError = getattr(errors, kind)(f"join(): {text}")
        raise error
    last, counts = rest
    for one in queues:
        one.end_join(counts.get(str(one.number), 0))
    for exchange in ranks.steps.exchanges():
        exchange.end_join()
    return int(last)


def _next(ranks: Negotiation, job: Job) -> Message:
    """Returns the next message to this rank; raises after too long a silence."""
    timeout_s = job.config.timeout.total_seconds()
    warning_s = job.config.stall_warning.total_seconds()
    began = time.monotonic()
    warned = False
    while True:
        silent_s = time.monotonic() - max(began, ranks.heard_at)
        if silent_s >= timeout_s:
            raise TransferTimeout(
                f"rank {job.rank} waits in join() and has heard nothing of the other ranks for "
                f"{timeout_s:g} s (HVD_ORDER_TIMEOUT); every rank must call join() in the end"
            )
        if silent_s >= warning_s and not warned:
            warned = True
            warnings.warn(
                f"rank {job.rank} waits in join() and has heard nothing of the other ranks for "
                f"{warning_s:g} s",
                RuntimeWarning,
                stacklevel=3,
            )
        end_s = timeout_s if warned else min(warning_s, timeout_s)
        try:
            return ranks.events.get(timeout=max(0.01, end_s - silent_s))
        except queue.Empty:
            continue


def _stand_in(
    ranks: Negotiation, early: dict[tuple[str, int], str], key: str, number: int, event: str
) -> None:
    """Repeats what another rank has done, unless this rank has done it already.

    Args:
        ranks: messages between the ranks.
        early: events whose predecessors have not arrived. A rank that already reports events may
            report one before it learns of this rank's join, and then sends the events that this
            rank lacks.
        key, number: identify the event, see `StepLog`.
        event: the event.
    """
    log = ranks.steps.get(key)
    if log is not None and number < log.count:
        return
    exchange = None if log is None else log.exchange
    if log is None or exchange is None:
        raise InvalidUsage(
            f"another rank trains with distributed optimizer {key}, which this rank does not have "
            "(any more); keep it while this rank waits in join()"
        )
    early[key, number] = event
    while (due := early.pop((key, log.count), None)) is not None:
        exchange.stand_in(due)
