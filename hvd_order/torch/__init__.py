"""hvd_order for PyTorch, with Horovod's names: ``import hvd_order.torch as hvd``."""

from hvd_order.torch._requirements import require_extension, require_torch

require_torch()
require_extension()

from hvd_order.errors import HorovodInternalError  # noqa: E402  (after the requirements)
from hvd_order.torch.collectives import (  # noqa: E402
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    poll,
    synchronize,
)
from hvd_order.torch.compression import Compression  # noqa: E402
from hvd_order.torch.functions import (  # noqa: E402
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from hvd_order.torch.optimizer import DistributedOptimizer  # noqa: E402
from hvd_order.torch.process import (  # noqa: E402
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
)
from hvd_order.torch.process_sets import ProcessSet, global_process_set  # noqa: E402
from hvd_order.torch.reduce_ops import (  # noqa: E402
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
)
from hvd_order.torch.timeline import start_timeline, stop_timeline, timeline_span  # noqa: E402

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "synchronize",
    "timeline_span",
]
