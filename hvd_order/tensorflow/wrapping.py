"""``hvd_order.tensorflow.DistributedOptimizer``: Keras' optimizers, which are TensorFlow 2's."""

from __future__ import annotations

from typing import Any

from hvd_order.base.errors import InvalidUsage
from hvd_order.base.reduce_op import Average
from hvd_order.tensorflow.ops.compression import Compression, Compressor
from hvd_order.tensorflow.ops.process_sets import ProcessSet, global_process_set

__all__ = ["DistributedOptimizer"]


def DistributedOptimizer(  # noqa: N802  (Horovod's name)
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] | Compressor = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | list[list[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Wraps an optimizer of Keras; see `hvd_order.tensorflow.keras.DistributedOptimizer`.

    Args:
        use_locking: accepted for Horovod's sake.

    Raises:
        InvalidUsage: ``tf.compat.v1`` optimizers, which work on graphs of TensorFlow 1.
    """
    from hvd_order.tensorflow import keras  # imported late: it takes a second, and needs Keras 3

    if hasattr(optimizer, "compute_gradients") and not hasattr(optimizer, "apply"):
        raise InvalidUsage(
            f"{type(optimizer).__name__} is an optimizer of TensorFlow 1; use one of keras, or "
            "hvd.DistributedGradientTape around a loop of your own"
        )
    return keras.DistributedOptimizer(
        optimizer, name, device_dense, device_sparse, compression, sparse_as_dense,
        gradient_predivide_factor, op, backward_passes_per_step, average_aggregated_gradients,
        num_groups, groups, process_set, scale_local_gradients,
    )  # fmt: skip
