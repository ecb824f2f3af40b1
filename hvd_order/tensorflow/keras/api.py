"""The API of Horovod's Keras modules, except callbacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvd_order.base.reduce_op import Average
from hvd_order.tensorflow.gradients.step import GradientReducer
from hvd_order.tensorflow.gradients.tape import check_groups
from hvd_order.tensorflow.keras.optimizer import is_distributed, wrap
from hvd_order.tensorflow.ops import collectives
from hvd_order.tensorflow.ops.compression import Compression, Compressor
from hvd_order.tensorflow.ops.process_sets import ProcessSet, global_process_set

__all__ = [
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "allgather",
    "allreduce",
    "broadcast",
    "load_model",
    "reducescatter",
]


def DistributedOptimizer(  # noqa: N802  (Horovod's name)
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] | Compressor = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | list[list[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Makes an optimizer of Keras 3 combine its gradients over the ranks before it uses them.

    Returns the same object, with the same class and configuration. Clipping, weight decay,
    accumulation, moving averages and loss scaling work as in one process.

    Args:
        optimizer: an optimizer of Keras 3; may be a ``LossScaleOptimizer``.
        name, device_dense, device_sparse: accepted for compatibility with Horovod.
        compression: compression of the gradients.
        sparse_as_dense: exchange ``tf.IndexedSlices`` as dense gradients.
        gradient_predivide_factor: an average divides by this before the sum, by the rest after.
        op: Average, Sum or Adasum.
        backward_passes_per_step: steps whose gradients are added up locally before they are
            exchanged; the optimizer's own ``gradient_accumulation_steps`` does the same, averaging.
        average_aggregated_gradients: average these gradients instead of adding them.
        num_groups, groups: fusion groups of Horovod; no effect here.
        process_set: ranks that take part.
        scale_local_gradients: of no effect; see `PartialDistributedOptimizer`.

    Raises:
        InvalidUsage: not an optimizer of Keras 3 on TensorFlow, or wrapped already.
        ValueError: the arguments are inconsistent.
        HvdOrderError: during training, if gradients to apply have not been reduced.
    """
    check_groups(num_groups, groups)
    reducer = GradientReducer.checked(
        op, compression, sparse_as_dense, gradient_predivide_factor, process_set
    )
    return wrap(optimizer, reducer, backward_passes_per_step, average_aggregated_gradients)


def PartialDistributedOptimizer(  # noqa: N802  (Horovod's name)
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] | Compressor = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    groups: int | list[list[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """`DistributedOptimizer` that does not reduce the gradients of some layers.

    Args:
        local_layers: one or more layers.
        scale_local_gradients: divide their gradients by the number of ranks.
    """
    check_groups(0, groups)
    reducer = GradientReducer.checked(
        op, compression, sparse_as_dense, gradient_predivide_factor, process_set
    )
    layers = tf.nest.flatten(local_layers if local_layers is not None else [])
    if not all(isinstance(layer, keras.layers.Layer) for layer in layers):
        raise ValueError("All local layers must be of tf.keras.layers.Layer type.")
    local = [variable for layer in layers for variable in layer.trainable_weights]
    return wrap(optimizer, reducer, local=local, scale_local=scale_local_gradients)


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: type[Compressor] | Compressor = Compression.none,
) -> Any:
    """The reduction of all ranks' values: numbers, arrays or tensors of one shape."""
    return collectives.allreduce(
        tf.convert_to_tensor(value),
        average=average,
        compression=compression,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        name=name,
    )


def allgather(value: Any, name: str | None = None) -> Any:
    """All ranks' values, joined along the first dimension."""
    return collectives.allgather(tf.convert_to_tensor(value), name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """The value of rank `root_rank`, on every rank."""
    return collectives.broadcast(tf.convert_to_tensor(value), root_rank, name)


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> Any:
    """This rank's rows of the reduction of all ranks' values."""
    return collectives.reducescatter(tf.convert_to_tensor(value), op=op, name=name)


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: type[Compressor] | Compressor = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Loads a saved model and wraps its optimizer in `DistributedOptimizer`.

    Args:
        filepath: same as in ``keras.models.load_model``.
        custom_optimizers: optimizer classes unknown to Keras.
        custom_objects: other objects unknown to Keras, by name.
        compression: compression of the optimizer.
        legacy_opts: accepted for compatibility with Horovod.
    """
    known: dict[str, Callable[..., Any]] = {cls.__name__: cls for cls in custom_optimizers or ()}
    known.update(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=known)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not is_distributed(optimizer):
        DistributedOptimizer(optimizer, compression=compression)
        model.train_function = None  # traced again, if it has been
    return model
