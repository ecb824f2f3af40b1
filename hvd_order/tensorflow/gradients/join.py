"""``join()``: a rank that has no more data waits for the others, and takes part with zeros."""

from __future__ import annotations

from hvd_order.tensorflow.backend.interface import started_backend
from hvd_order.tensorflow.gradients import deferred_updates

__all__ = ["join"]


def join() -> int:
    """Says that this rank has no more data, and waits until all ranks have said so.

    Until then it takes part in what the others do: with zeros in allreduce, reducescatter and the
    gradients of `DistributedGradientTape` and `DistributedOptimizer`, without rows in allgather and
    sparse gradients. Averages still divide by the number of all ranks. Whatever else the others
    call raises there, `broadcast` for example, and so does the first step of a function that was
    not traced before. The variables of this rank stay as they are; the returned rank has the
    latest, so training usually goes on with ``broadcast_variables(..., root_rank=join())``.

    Returns:
        The rank that joined last, the same on all ranks.

    Raises:
        NotInitialized: before ``init()``.
        NotImplementedError: over MPI.
        HorovodInternalError: another rank died, shut down, or failed.
        TransferTimeout: nothing was heard of the others for ``HVD_ORDER_TIMEOUT``.
    """
    backend = started_backend()
    deferred_updates.flush()
    return backend.join()
