"""Gradients of the collectives, as Horovod defines them. Importing this registers them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import tensorflow as tf

from hvd_order.base.reduce_op import Average, Sum
from hvd_order.tensorflow.backend.interface import Collective, started_backend
from hvd_order.tensorflow.ops.collectives import execute
from hvd_order.tensorflow.ops.process_sets import members
from hvd_order.tensorflow.ops.requests import collective_of

__all__: list[str] = []


@tf.RegisterGradient("HvdOrderCollective")
def _gradient(operator: Any, *gradients: Any) -> list[Any]:
    collective = collective_of(operator.get_attr("description"))
    incoming = [
        tf.zeros_like(output) if gradient is None else tf.convert_to_tensor(gradient)
        for output, gradient in zip(operator.outputs, gradients, strict=True)
    ]
    unnamed = replace(collective, name=None)
    found = _GRADIENTS[collective.kind](unnamed, operator, incoming)
    return found + [None] * (len(operator.inputs) - len(found))  # handles, for the order


def _tensors(operator: Any) -> list[Any]:
    return [one for one in operator.inputs if one.dtype != tf.resource]


def _of_allreduce(collective: Collective, operator: Any, incoming: list[Any]) -> list[Any]:
    return _like(execute(collective, incoming, [one.dtype for one in incoming]), operator)


def _like(results: list[Any], operator: Any) -> list[Any]:
    for result, tensor in zip(results, _tensors(operator), strict=True):
        result.set_shape(tensor.shape)
    return results


def _average(collective: Collective, incoming: list[Any]) -> list[Any]:
    average = Collective("allreduce", op=Average, process_set=collective.process_set)
    return [execute(average, [one], [one.dtype])[0] for one in incoming]


def _of_allgather(collective: Collective, operator: Any, incoming: list[Any]) -> list[Any]:
    """This rank's rows of the average over all ranks."""
    ranks = members(collective.process_set)
    mine = ranks.index(started_backend().rank())
    gather = Collective("allgather", process_set=collective.process_set)
    results = []
    averaged = _average(collective, incoming)
    for tensor, gradient in zip(_tensors(operator), averaged, strict=True):
        count = tf.reshape(tf.size(tensor) if tensor.shape.rank == 0 else tf.shape(tensor)[0], [1])
        counts = execute(gather, [count], [count.dtype])[0]
        first = tf.reduce_sum(counts[:mine])
        rows = gradient[first : first + count[0]]
        results.append(tf.reshape(rows, tf.shape(tensor)))
    return results


def _of_broadcast(collective: Collective, operator: Any, incoming: list[Any]) -> list[Any]:
    """The average over all ranks on the root, zero elsewhere."""
    averaged = _average(collective, incoming)
    if started_backend().rank() != collective.root_rank:
        averaged = [tf.zeros_like(one) for one in averaged]
    return _like(averaged, operator)


def _of_alltoall(collective: Collective, operator: Any, incoming: list[Any]) -> list[Any]:
    """Sends every row back to where it came from."""
    rows, _ = execute(collective, [incoming[0], operator.outputs[1]], [incoming[0].dtype, tf.int32])
    rows.set_shape(operator.inputs[0].shape)
    return [rows]


def _of_reducescatter(collective: Collective, operator: Any, incoming: list[Any]) -> list[Any]:
    factor = collective.prescale_factor * collective.postscale_factor
    if collective.op == Sum:
        factor *= len(members(collective.process_set))
    gather = replace(collective, kind="allgather", prescale_factor=1.0, postscale_factor=1.0)
    # tf.cast alone would take the number in float32.
    scaled = [one * tf.cast(tf.constant(factor, tf.float64), one.dtype) for one in incoming]
    return _like(execute(gather, scaled, [one.dtype for one in scaled]), operator)


_GRADIENTS: dict[str, Callable[[Collective, Any, list[Any]], list[Any]]] = {
    "allreduce": _of_allreduce,
    "allgather": _of_allgather,
    "broadcast": _of_broadcast,
    "alltoall": _of_alltoall,
    "reducescatter": _of_reducescatter,
}
