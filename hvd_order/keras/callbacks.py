"""Callbacks for ``model.fit``; those of `hvd_order.tensorflow.keras.callbacks`."""

from hvd_order.tensorflow.keras.callbacks import *  # noqa: F403
from hvd_order.tensorflow.keras.callbacks import __all__ as __all__
