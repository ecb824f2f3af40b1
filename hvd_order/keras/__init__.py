"""hvd_order for Keras 3 on TensorFlow: ``import hvd_order.keras as hvd``."""

from hvd_order.tensorflow.keras import *  # noqa: F403
from hvd_order.tensorflow.keras import __all__ as __all__
