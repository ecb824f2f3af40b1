"""Profiles of a step of tf.distribute.ParameterServerStrategy, from the traces of its processes."""

from hvd_order.tensorflow.strategy.profile import profile_of_strategy

__all__ = ["profile_of_strategy"]
