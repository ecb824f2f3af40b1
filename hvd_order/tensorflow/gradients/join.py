"""``join()``: a rank without more data waits for the other ranks, and takes part with zeros."""

from __future__ import annotations

from hvd_order.tensorflow.backend.interface import started_backend
from hvd_order.tensorflow.gradients import deferred_updates

__all__ = ["join"]


def join() -> int:
    """Marks this rank as joined, and waits until all ranks have joined.

    Until then this rank takes part in the collectives of the other ranks: with zeros in allreduce,
    reducescatter and the gradients of `DistributedGradientTape` and `DistributedOptimizer`, without
    rows in allgather and sparse gradients. Averages still divide by the number of all ranks. Other
    calls raise on the other ranks, for example `broadcast`, and so does the first step of a
    function that was not traced before. The variables of this rank do not change. The returned rank
    has the latest, so training usually continues with
    ``broadcast_variables(..., root_rank=join())``.

    Returns:
        The rank that joined last, the same on all ranks.

    Raises:
        NotInitialized: before ``init()``.
        HorovodInternalError: another rank died, shut down, or failed.
        TransferTimeout: no message from the other ranks for ``HVD_ORDER_TIMEOUT``.
    """
    backend = started_backend()
    deferred_updates.flush()
    return backend.join()
