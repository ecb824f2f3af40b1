"""hvd_order for Keras 3 on TensorFlow: ``import hvd_order.tensorflow.keras as hvd``."""

from hvd_order.base.errors import HorovodInternalError
from hvd_order.base.reduce_op import Adasum, Average, Sum
from hvd_order.tensorflow.gradients.deferred_updates import flush
from hvd_order.tensorflow.keras import callbacks, elastic
from hvd_order.tensorflow.keras.api import (
    DistributedOptimizer,
    PartialDistributedOptimizer,
    allgather,
    allreduce,
    broadcast,
    load_model,
    reducescatter,
)
from hvd_order.tensorflow.keras.overlap import overlapped_function
from hvd_order.tensorflow.ops import process
from hvd_order.tensorflow.ops.compression import Compression
from hvd_order.tensorflow.ops.functions import (
    broadcast_global_variables,
    broadcast_object,
    broadcast_variables,
)
from hvd_order.tensorflow.ops.process import *  # noqa: F403
from hvd_order.tensorflow.ops.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Sum",
    "add_process_set",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "elastic",
    "flush",
    "global_process_set",
    "load_model",
    "overlapped_function",
    "reducescatter",
    "remove_process_set",
]
__all__ += process.__all__
