"""Rank and size as tensors that are evaluated when a graph runs, not when it is traced.

Functions that outlive a ``shutdown()`` and ``init()`` get the new numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_order.tensorflow.ops import process
from hvd_order.tensorflow.ops.process_sets import members

__all__ = ["local_rank_op", "local_size_op", "process_set_included_op", "rank_op", "size_op"]


def _when_executed(number: Callable[[], int], name: str | None) -> Any:
    if tf.executing_eagerly():
        return tf.constant(number(), tf.int32)
    tensor = tf.numpy_function(lambda: np.int32(number()), [], tf.int32, name=name)
    tensor.set_shape([])
    return tensor


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """How many processes a process set has, int32."""
    return _when_executed(lambda: len(members(process_set_id)), name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """1 if this process belongs to a process set, else 0; int32."""
    return _when_executed(lambda: int(process.rank() in members(process_set_id)), name)


def local_size_op(name: str | None = None) -> Any:
    """How many processes of the job this host has, int32."""
    return _when_executed(process.local_size, name)


def rank_op(name: str | None = None) -> Any:
    """This process's number, int32."""
    return _when_executed(process.rank, name)


def local_rank_op(name: str | None = None) -> Any:
    """This process's number among those of its host, int32."""
    return _when_executed(process.local_rank, name)
