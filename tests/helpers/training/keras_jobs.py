"""What tests of TensorFlow and Keras share."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

__all__ = ["MARKS", "PATIENCE_S", "apart", "dtype_policy", "flat", "shim", "tf_shim"]

MARKS = [
    pytest.mark.skipif(
        importlib.util.find_spec("tensorflow") is None,
        reason="TensorFlow is not installed: pip install -r requirements/tensorflow.txt",
    ),
    pytest.mark.timeout(300),
]
PATIENCE_S = 240.0  # for all ranks of a test


def shim() -> tuple[Any, Any]:
    """Keras, and ours for it."""
    import keras

    import hvd_order.keras as hvd

    hvd.init()
    return keras, hvd


def tf_shim() -> tuple[Any, Any]:
    """TensorFlow, and ours for it."""
    import tensorflow as tf

    import hvd_order.tensorflow as hvd

    hvd.init()
    return tf, hvd


@contextlib.contextmanager
def dtype_policy(keras: Any, policy: str) -> Iterator[None]:
    """What layers are made with meanwhile."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def flat(model: Any) -> Any:
    """All weights of a model."""
    return np.concatenate([w.numpy().ravel() for w in model.weights])


def apart(mine: Any, wanted: Any) -> tuple[float, float]:
    """How far this rank's numbers are from those of one process, and the ranks' from each other."""
    _, hvd = tf_shim()
    everyone = np.asarray(hvd.allgather(mine[None]))
    return float(np.abs(mine - wanted).max()), float(np.ptp(everyone, axis=0).max())
