"""hvd_order for TensorFlow, with Horovod's names: ``import hvd_order.tensorflow as hvd``."""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if importlib.util.find_spec("tensorflow") is None:
    raise ImportError(
        "hvd_order.tensorflow needs TensorFlow, which is not installed; install it with: "
        "pip install tensorflow"
    )

from hvd_order.base.errors import HorovodInternalError
from hvd_order.base.reduce_op import Adasum, Average, Max, Min, Product, Sum
from hvd_order.tensorflow import elastic, mpi_ops
from hvd_order.tensorflow.gradients.deferred_updates import flush
from hvd_order.tensorflow.gradients.join import join
from hvd_order.tensorflow.gradients.tape import (
    DistributedGradientTape,
    PartialDistributedGradientTape,
)
from hvd_order.tensorflow.ops import differentiation as differentiation
from hvd_order.tensorflow.ops import process, rank_ops
from hvd_order.tensorflow.ops.collectives import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    broadcast_,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
from hvd_order.tensorflow.ops.compression import Compression
from hvd_order.tensorflow.ops.functions import (
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from hvd_order.tensorflow.ops.process import *  # noqa: F403
from hvd_order.tensorflow.ops.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from hvd_order.tensorflow.ops.rank_ops import *  # noqa: F403
from hvd_order.tensorflow.wrapping import DistributedOptimizer

if TYPE_CHECKING:
    from hvd_order.tensorflow.keras.overlap import overlapped_function
    from hvd_order.tensorflow.keras.sync_batch_norm import SyncBatchNormalization

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "elastic",
    "flush",
    "global_process_set",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "mpi_ops",
    "overlapped_function",
    "reducescatter",
    "remove_process_set",
]
__all__ += process.__all__
__all__ += rank_ops.__all__


# Keras takes a second to import, and not every program needs it.
_OF_KERAS = {
    "SyncBatchNormalization": "hvd_order.tensorflow.keras.sync_batch_norm",
    "overlapped_function": "hvd_order.tensorflow.keras.overlap",
}


def __getattr__(name: str) -> Any:
    if name in _OF_KERAS:
        return getattr(importlib.import_module(_OF_KERAS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
