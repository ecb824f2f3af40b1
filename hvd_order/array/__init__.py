"""Horovod's collectives for numpy, cupy and other arrays: ``import hvd_order.array as hvd``.

For programs that train, or only combine numbers, without PyTorch tensors::

    import numpy as np
    import hvd_order.array as hvd

    hvd.init()
    mean = hvd.allreduce(np.array([1.0, 2.0]) * hvd.rank())

The bytes travel through torch.distributed, on the same queue as the collectives of
`hvd_order.torch`; the program itself never sees a tensor. PyTorch is imported by the first use of
a name below, not by the import of this package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvd_order.array.collectives import (
        allgather,
        allgather_async,
        allreduce,
        allreduce_,
        allreduce_async,
        allreduce_async_,
        alltoall,
        alltoall_async,
        broadcast,
        broadcast_,
        broadcast_async,
        broadcast_async_,
        poll,
        reducescatter,
        reducescatter_async,
        synchronize,
    )
    from hvd_order.base.errors import HorovodInternalError
    from hvd_order.engine.job.process import (
        cross_rank,
        cross_size,
        is_initialized,
        local_rank,
        local_size,
        rank,
        shutdown,
        size,
    )
    from hvd_order.engine.process_sets import (
        ProcessSet,
        add_process_set,
        global_process_set,
        init,
        remove_process_set,
    )
    from hvd_order.engine.requests.reduce_ops import Average, Max, Min, Product, Sum
    from hvd_order.torch.collectives.functions import allgather_object, broadcast_object
    from hvd_order.torch.collectives.single import barrier

__all__ = [
    "Average",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "cross_rank",
    "cross_size",
    "global_process_set",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "shutdown",
    "size",
    "synchronize",
]


def __getattr__(name: str) -> Any:
    """Returns a public name after importing PyTorch (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        shim = importlib.import_module("hvd_order.torch")
    except ImportError as error:
        raise ImportError(
            f"hvd_order.array moves arrays with PyTorch's torch.distributed: {error}"
        ) from error
    own = importlib.import_module("hvd_order.array.collectives")
    value = getattr(own if name in own.__all__ else shim, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
