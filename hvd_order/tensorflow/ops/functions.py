"""Broadcast and gathering of variables and Python objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from hvd_order.base.errors import InvalidUsage
from hvd_order.tensorflow.backend.interface import started_backend
from hvd_order.tensorflow.ops.collectives import broadcast_
from hvd_order.tensorflow.ops.process_sets import ProcessSet, global_process_set, number_of

__all__ = [
    "allgather_object",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
]


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Overwrites variables on all ranks with those of rank `root_rank`.

    Args:
        variables: of TensorFlow or Keras, in the same order on every rank.
        root_rank: whose values.
        process_set: who takes part.
        inplace: accepted for Horovod's sake; this makes no difference here.

    Returns:
        In a graph of TensorFlow 1 the operation that does it, else None.

    Raises:
        ModelMismatch: ranks have other shapes or dtypes (raised on every rank).
        HorovodInternalError: another rank died, or did not come in time.
    """
    assigned = broadcast_(list(variables), root_rank, process_set=process_set)
    if tf.executing_eagerly() or tf.compat.v1.get_default_graph().building_function:
        return None
    return tf.group(*assigned)


def broadcast_global_variables(root_rank: int) -> Any:
    """Overwrites all variables of a graph of TensorFlow 1 with those of rank `root_rank`.

    Returns:
        The operation that does it.

    Raises:
        InvalidUsage: in eager mode, which has no list of all variables.
    """
    if tf.executing_eagerly():
        raise InvalidUsage(
            "hvd.broadcast_global_variables() does not support eager execution: use "
            "hvd.broadcast_variables(model.variables, root_rank=0) instead"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The object of rank `root_rank`, on every rank; it travels pickled.

    Args:
        obj: what to send; looked at only on the root.
        root_rank: whose object.
        session: accepted for Horovod's sake.
        name: shown in errors.
        process_set: who takes part.

    Raises:
        HorovodInternalError: the root's object cannot be pickled (raised on every rank).
    """
    number = number_of(process_set)
    return started_backend().broadcast_object(obj, root_rank, name, number)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """`broadcast_object` with all but the object fixed."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Every rank's object, in rank order, on every rank; they travel pickled."""
    return started_backend().allgather_object(obj, name, number_of(process_set))
