"""What Horovod's Keras modules offer besides callbacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvd_order.reduce_op import Average
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
    compression: type[Compressor] = Compression.none,
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
    """Has an optimizer of Keras 3 combine its gradients over the ranks before it uses them.

    It is the same object afterwards, of the same class and configuration; clipping, weight decay,
    accumulation, moving averages and loss scaling work as in one process.

    Args:
        optimizer: of Keras 3, also a ``LossScaleOptimizer``.
        name: accepted for Horovod's sake, as are device_dense and device_sparse.
        compression: what travels instead of the gradients.
        sparse_as_dense: exchange ``tf.IndexedSlices`` as dense gradients.
        gradient_predivide_factor: an average divides by this before the sum, by the rest after.
        op: Average, Sum or Adasum.
        backward_passes_per_step: steps whose gradients are added up locally before they are
            exchanged; the optimizer's own ``gradient_accumulation_steps`` does the same, averaging.
        average_aggregated_gradients: average those, instead of adding them up.
        num_groups, groups: what may share a message in Horovod; changes nothing here.
        process_set: who takes part.
        scale_local_gradients: of no effect; see `PartialDistributedOptimizer`.

    Raises:
        InvalidUsage: not an optimizer of Keras 3 on TensorFlow, or wrapped already.
        ValueError: arguments that do not fit each other.
        HvdOrderError: while it trains: gradients were about to be applied that were not reduced.
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
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    groups: int | list[list[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """`DistributedOptimizer` that leaves the gradients of some layers to each rank.

    Args:
        local_layers: a layer or several.
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
    compression: type[Compressor] = Compression.none,
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
    compression: type[Compressor] = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """A saved model, whose optimizer is a `DistributedOptimizer` again.

    Args:
        filepath: as ``keras.models.load_model`` takes it.
        custom_optimizers: classes that Keras does not know.
        custom_objects: by name, what else it does not know.
        compression: of the optimizer.
        legacy_opts: accepted for Horovod's sake.
    """
    known: dict[str, Callable[..., Any]] = {cls.__name__: cls for cls in custom_optimizers or ()}
    known.update(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=known)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not is_distributed(optimizer):
        DistributedOptimizer(optimizer, compression=compression)
        model.train_function = None  # traced again, if it has been
    return model
