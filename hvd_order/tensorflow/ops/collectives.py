"""allreduce, allgather, broadcast, alltoall and reducescatter, as in Horovod's TensorFlow API.

They work in eager mode and in traced functions, where calls without names run in the order of
the program on every rank. All are differentiable (differentiation.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd_order.base.errors import InvalidUsage
from hvd_order.base.reduce_op import Average, ReduceOp, Sum, choose_op
from hvd_order.tensorflow.backend import op_library
from hvd_order.tensorflow.backend.failures import as_both, translated
from hvd_order.tensorflow.backend.interface import Collective
from hvd_order.tensorflow.ops.call_order import CollectivePlace, eager_turn, in_graph
from hvd_order.tensorflow.ops.compression import Compression, Compressor
from hvd_order.tensorflow.ops.process_sets import ProcessSet, global_process_set, number_of
from hvd_order.tensorflow.ops.requests import number_of_collective

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_",
    "execute",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "reducescatter",
]


def execute(
    collective: Collective, tensors: Sequence[Any], dtypes: Sequence[tf.DType]
) -> list[Any]:
    """Runs a collective now, or at each execution of the graph being traced.

    Raises:
        HorovodInternalError: or a related class, in eager mode, if it failed. A traced function
            raises TensorFlow's class, with our class at the beginning of the text.
    """
    if not tf.executing_eagerly():
        return _operator(in_graph(collective, tensors), tensors, dtypes)
    try:
        with eager_turn(collective):
            return _operator(CollectivePlace(collective, ""), tensors, dtypes)
    except tf.errors.OpError as error:
        raise translated(error) from error


def _operator(
    place: CollectivePlace, tensors: Sequence[Any], dtypes: Sequence[tf.DType]
) -> list[Any]:
    results: list[Any] = op_library.load().ops.hvd_order_collective(
        list(tensors),
        list(place.order),
        Tout=list(dtypes),
        description=number_of_collective(place.collective),
        name=place.operator or None,
    )
    return results


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] | Compressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """The reduction of all ranks' tensors; differentiable.

    Args:
        tensor: the same shape and dtype on every rank. ``tf.IndexedSlices`` are gathered (and
            divided, for an average).
        average: deprecated; use `op`.
        device_dense, device_sparse: accepted for compatibility with Horovod.
        compression: compression of the tensor.
        op: Average (the default), Sum, Min, Max, Product or Adasum.
        prescale_factor: multiplies each rank's tensor before the reduction.
        postscale_factor: multiplies the result.
        name: name that matches the ranks' calls.
        process_set: ranks that take part; only members may call.
        ignore_name_scope: accepted for compatibility with Horovod; names have no scope here.

    Returns:
        A tensor of the same shape and dtype, or IndexedSlices.

    Raises:
        ValueError: a mistake in the arguments.
        NotImplementedError: reductions of IndexedSlices other than Sum and Average, or scaled.
        HorovodInternalError: see `execute`.
    """
    chosen = choose_op(op, average)
    if isinstance(tensor, tf.IndexedSlices):
        _check_sparse(chosen, prescale_factor, postscale_factor)
        return _gather_slices([tensor], chosen, process_set)[0]
    tensor = tf.convert_to_tensor(tensor)
    wire, context = compression.compress(tensor)
    collective = Collective(
        "allreduce", name, chosen, prescale_factor, postscale_factor,
        process_set=number_of(process_set),
    )  # fmt: skip
    reduced = execute(collective, [wire], [wire.dtype])[0]
    reduced.set_shape(wire.shape)
    return compression.decompress(reduced, context)


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] | Compressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """`allreduce` of several tensors in few messages; arguments and errors are the same.

    Returns:
        The results in the order of ``tensors``.
    """
    chosen = choose_op(op, average)
    results: list[Any] = list(tensors)
    sparse = [i for i, one in enumerate(results) if isinstance(one, tf.IndexedSlices)]
    dense = [i for i in range(len(results)) if i not in set(sparse)]
    if sparse:
        _check_sparse(chosen, prescale_factor, postscale_factor)
        gathered = _gather_slices([tensors[i] for i in sparse], chosen, process_set)
        for i, one in zip(sparse, gathered, strict=True):
            results[i] = one
    if dense:
        packed = [compression.compress(tf.convert_to_tensor(tensors[i])) for i in dense]
        collective = Collective(
            "allreduce", name, chosen, prescale_factor, postscale_factor, grouped=True,
            process_set=number_of(process_set),
        )  # fmt: skip
        wires = [wire for wire, _ in packed]
        reduced = execute(collective, wires, [wire.dtype for wire in wires])
        for i, one, (wire, context) in zip(dense, reduced, packed, strict=True):
            one.set_shape(wire.shape)
            results[i] = compression.decompress(one, context)
    return results


def _check_sparse(op: ReduceOp, prescale_factor: float, postscale_factor: float) -> None:
    if op not in (Sum, Average):
        raise NotImplementedError(
            f"hvd.{op.name} is not defined for tf.IndexedSlices, only Sum and Average are; pass "
            "sparse_as_dense=True, or tf.convert_to_tensor(slices)"
        )
    if prescale_factor != 1.0 or postscale_factor != 1.0:
        raise NotImplementedError("Pre/postscale_factor are not supported with tf.IndexedSlices")


def _gather_slices(
    slices: Sequence[tf.IndexedSlices], op: ReduceOp, process_set: ProcessSet
) -> list[tf.IndexedSlices]:
    """Gathers the rows of all ranks; rows of one index add up when applied."""
    values = grouped_allgather([one.values for one in slices], process_set=process_set)
    indices = grouped_allgather([one.indices for one in slices], process_set=process_set)
    if op == Average:
        values = [one / tf.cast(len(process_set.ranks), one.dtype) for one in values]
    return [
        tf.IndexedSlices(v, i, dense_shape=one.dense_shape)
        for v, i, one in zip(values, indices, slices, strict=True)
    ]


def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """All ranks' tensors, joined along the first dimension in rank order; differentiable.

    Args:
        tensor: the same dtype and shape on every rank except for the first dimension, which may
            differ and be 0. A tensor without dimensions counts as one of shape [1].
        name, ignore_name_scope, process_set: see `allreduce`.

    Raises:
        The same as `allreduce`.
    """
    return _gather([tensor], name, False, process_set)[0]


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """`allgather` of several tensors."""
    return _gather(tensors, name, True, process_set)


def _gather(
    tensors: Sequence[Any], name: str | None, grouped: bool, process_set: ProcessSet
) -> list[Any]:
    rows = [tf.convert_to_tensor(one) for one in tensors]
    collective = Collective("allgather", name, grouped=grouped, process_set=number_of(process_set))
    gathered = execute(collective, rows, [one.dtype for one in rows])
    for result, one in zip(gathered, rows, strict=True):
        result.set_shape(_rows_of(one.shape))
    return gathered


def _rows_of(shape: tf.TensorShape) -> tf.TensorShape:
    """The shape with any number of rows."""
    if shape.rank is None:
        return shape
    return tf.TensorShape([None, *shape[1:]])


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The tensor of rank `root_rank`, on every rank; differentiable.

    Args:
        tensor: the same shape and dtype on every rank; only the root's values matter.
        root_rank: root, as its rank in the job, as in Horovod.
        name, ignore_name_scope, process_set: see `allreduce`.

    Raises:
        The same as `allreduce`.
    """
    tensor = tf.convert_to_tensor(tensor)
    collective = Collective(
        "broadcast", name, root_rank=root_rank, process_set=number_of(process_set)
    )
    result = execute(collective, [tensor], [tensor.dtype])[0]
    result.set_shape(tensor.shape)
    return result


def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Overwrites variables on all ranks with those of rank `root_rank`; returns the assignments."""
    assigned = []
    for i, variable in enumerate(variables):
        full_name = None if name is None else f"{name}.{i}"
        value = broadcast(variable, root_rank, full_name, process_set=process_set)
        assigned.append(variable.assign(value))
    return assigned


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends some rows of the tensor to each rank, and joins the received rows; differentiable.

    Args:
        tensor: the same dtype and shape on every rank except for the first dimension.
        splits: number of rows for each rank, in rank order; equal parts if None.
        name, ignore_name_scope, process_set: see `allreduce`.

    Returns:
        The rows from all ranks in rank order; with ``splits``, a tuple of them and of how many
        came from each rank.

    Raises:
        ValueError: ``splits`` does not fit the tensor, or there is none and the ranks do not
            divide the first dimension.
        HorovodInternalError: as for `allreduce`.
    """
    tensor = tf.convert_to_tensor(tensor)
    inputs = [tensor]
    if splits is not None:
        inputs.append(tf.cast(tf.convert_to_tensor(splits), tf.int32))
    collective = Collective("alltoall", name, process_set=number_of(process_set))
    rows, received = execute(collective, inputs, [tensor.dtype, tf.int32])
    rows.set_shape(_rows_of(tensor.shape))
    received.set_shape([len(process_set.ranks)])
    return rows if splits is None else (rows, received)


def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: type[Compressor] | Compressor = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """This rank's rows of the reduction of all ranks' tensors; differentiable.

    Args:
        tensor: the same shape and dtype on every rank, with at least one dimension.
        device_dense: accepted for compatibility with Horovod.
        compression: compression of the tensor.
        op: Average, Sum, Min, Max or Product.
        name, process_set, ignore_name_scope: as for `allreduce`.
        prescale_factor: multiplies each rank's tensor before the reduction.
        postscale_factor: multiplies the result.

    Returns:
        Rows in rank order; where the ranks do not divide them, the first ranks have one more.

    Raises:
        The same as `allreduce`.
    """
    return _scatter(
        [tensor], compression, op, name, process_set, (prescale_factor, postscale_factor), False
    )[0]


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: type[Compressor] | Compressor = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """`reducescatter` of several tensors."""
    scales = (prescale_factor, postscale_factor)
    return _scatter(tensors, compression, op, None, process_set, scales, True)


def _scatter(
    tensors: Sequence[Any],
    compression: type[Compressor] | Compressor,
    op: int,
    name: str | None,
    process_set: ProcessSet,
    scales: tuple[float, float],
    grouped: bool,
) -> list[Any]:
    chosen = choose_op(op, None, adasum=False)
    packed = [compression.compress(tf.convert_to_tensor(one)) for one in tensors]
    wires = [wire for wire, _ in packed]
    if any(wire.shape.rank == 0 for wire in wires):
        raise as_both(InvalidUsage, "reducescatter needs a tensor with at least one dimension")
    collective = Collective(
        "reducescatter", name, chosen, *scales, grouped=grouped, process_set=number_of(process_set)
    )
    results = []
    scattered = execute(collective, wires, [wire.dtype for wire in wires])
    for one, (wire, context) in zip(scattered, packed, strict=True):
        one.set_shape(_rows_of(wire.shape))
        results.append(compression.decompress(one, context))
    return results
