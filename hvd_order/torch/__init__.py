"""hvd_order for PyTorch, with Horovod's names: ``import hvd_order.torch as hvd``."""

from hvd_order.torch._requirements import require_extension, require_torch

require_torch()
require_extension()

from hvd_order.c10d.engine.timeline import start_timeline, stop_timeline, timeline_span  # noqa: E402
from hvd_order.c10d.job.process import (  # noqa: E402
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
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
from hvd_order.c10d.process_sets import (  # noqa: E402
    ProcessSet,
    add_process_set,
    global_process_set,
    init,
    remove_process_set,
)
from hvd_order.c10d.requests.join import join  # noqa: E402
from hvd_order.c10d.requests.reduce_ops import (  # noqa: E402
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
)
from hvd_order.errors import HorovodInternalError  # noqa: E402  (after the requirements)
from hvd_order.torch import elastic  # noqa: E402
from hvd_order.torch.collectives.alltoall_reducescatter import (  # noqa: E402
    alltoall,
    alltoall_async,
    reducescatter,
    reducescatter_async,
)
from hvd_order.torch.collectives.compression import Compression  # noqa: E402
from hvd_order.torch.collectives.functions import (  # noqa: E402
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from hvd_order.torch.collectives.grouped import (  # noqa: E402
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
)
from hvd_order.torch.collectives.single import (  # noqa: E402
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
from hvd_order.torch.collectives.sync_batch_norm import SyncBatchNorm  # noqa: E402
from hvd_order.torch.gradients.sparse import sparse_allreduce_async  # noqa: E402
from hvd_order.torch.optimizer.distributed_optimizer import DistributedOptimizer  # noqa: E402

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
    "SyncBatchNorm",
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
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
    "timeline_span",
]
