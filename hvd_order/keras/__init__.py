"""hvd_order for Keras 3 on TensorFlow: ``import hvd_order.keras as hvd``."""

from hvd_order.tensorflow.keras import *  # noqa: F403
from hvd_order.tensorflow.keras import __all__ as __all__
from hvd_order.tensorflow.ops.process import *  # noqa: F403 - type checkers do not see these there
