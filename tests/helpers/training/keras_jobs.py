"""What tests of TensorFlow and Keras share."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

__all__ = ["MARKS", "PATIENCE_S", "shim"]

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
