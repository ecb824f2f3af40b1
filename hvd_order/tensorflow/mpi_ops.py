"""``horovod.tensorflow.mpi_ops``: collectives, ranks and reduce operations under Horovod's name."""

from hvd_order.base.reduce_op import Adasum, Average, Max, Min, Product, Sum
from hvd_order.tensorflow.gradients.join import join
from hvd_order.tensorflow.ops import process, rank_ops
from hvd_order.tensorflow.ops.collectives import (
    allgather,
    alltoall,
    broadcast,
    broadcast_,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
from hvd_order.tensorflow.ops.process import *  # noqa: F403
from hvd_order.tensorflow.ops.process_sets import ProcessSet, global_process_set
from hvd_order.tensorflow.ops.rank_ops import *  # noqa: F403

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "allgather",
    "alltoall",
    "broadcast",
    "broadcast_",
    "global_process_set",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "reducescatter",
]
__all__ += process.__all__
__all__ += rank_ops.__all__
