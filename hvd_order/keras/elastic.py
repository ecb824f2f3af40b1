"""Elastic training; see `hvd_order.tensorflow.keras.elastic`."""

from hvd_order.tensorflow.keras.elastic import *  # noqa: F403
from hvd_order.tensorflow.keras.elastic import __all__ as __all__
