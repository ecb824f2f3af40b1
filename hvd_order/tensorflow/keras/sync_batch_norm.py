"""``SyncBatchNormalization``: batch statistics over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from hvd_order.base.reduce_op import Sum
from hvd_order.tensorflow.ops import process
from hvd_order.tensorflow.ops.collectives import allreduce

__all__ = ["SyncBatchNormalization"]


class SyncBatchNormalization(keras.layers.BatchNormalization):
    """Normalizes with mean and variance of all ranks' batches together.

    Batches may differ in size: each element counts alike.

    Args:
        fused: only False, for Horovod's sake.
        kwargs: of ``keras.layers.BatchNormalization``.

    Raises:
        ValueError: fused, or ``synchronized``, which is Keras' own way for ``tf.distribute``.
    """

    def __init__(self, fused: bool = False, **kwargs: Any) -> None:
        if fused in (True, None):
            raise ValueError("SyncBatchNormalization does not support fused=True.")
        if kwargs.get("synchronized"):
            raise ValueError("synchronized=True is for tf.distribute; leave it out here")
        super().__init__(**kwargs)

    def _moments(self, inputs: Any, mask: Any) -> Any:
        mean, variance = super()._moments(inputs, mask)
        if process.size() == 1:
            return mean, variance
        if mask is None:
            elements = tf.size(inputs) // inputs.shape[self.axis]
        else:
            elements = tf.math.count_nonzero(mask)
        count = tf.cast(elements, mean.dtype)
        flat_mean, flat_variance = tf.reshape(mean, [-1]), tf.reshape(variance, [-1])
        mine = [flat_mean * count, (flat_variance + flat_mean**2) * count, count[None]]
        width = flat_mean.shape[0]
        sums = allreduce(tf.concat(mine, axis=0), op=Sum)
        total, total_square, total_count = tf.split(sums, [width, width, 1])
        mean_of_all = total / total_count
        variance_of_all = total_square / total_count - mean_of_all**2
        return (
            tf.reshape(mean_of_all, tf.shape(mean)),
            tf.reshape(tf.maximum(variance_of_all, 0.0), tf.shape(variance)),
        )
