"""Numbers that go through no narrower type than Keras and TensorFlow put them through.

Every rank has the same rows, so the average over the ranks is exactly one rank's gradient, and
training has the bits of plain Keras.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from helpers.on_ranks import on_ranks
from helpers.training.keras_jobs import MARKS, PATIENCE_S, dtype_policy, shim, tf_shim

pytestmark = MARKS
THIRD = 1 / 3  # float32(THIRD) differs from it by 3e-8

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "rate": lambda own: own.SGD(0.02),
    "schedule": lambda own: own.SGD(own.schedules.ExponentialDecay(0.02, 2, 0.9)),
    "callable": lambda own: own.SGD(lambda: 0.02),
    "decay and clipping": lambda own: own.AdamW(0.0013, weight_decay=0.017, clipnorm=0.3),
    "loss scale": lambda own: own.LossScaleOptimizer(own.SGD(0.02), initial_scale=8.0),
}


@contextlib.contextmanager
def floating(keras: Any, floatx: str) -> Iterator[None]:
    before = keras.config.floatx()
    with dtype_policy(keras, floatx):
        keras.config.set_floatx(floatx)
        try:
            yield
        finally:
            keras.config.set_floatx(before)


def fitted(keras: Any, optimizer: Any, dtype: str) -> bytes:
    """Bits of the weights after some steps."""
    random = np.random.default_rng(0)
    x, y = random.normal(size=(8, 3)), random.normal(size=(8, 1))
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer, loss="mse", jit_compile=False)
    model.fit(x, y, batch_size=2, epochs=2, shuffle=False, verbose=0)
    values = [np.asarray(w) for w in model.get_weights()]
    assert all(str(value.dtype) == dtype for value in values)
    return b"".join(value.tobytes() for value in values)


@pytest.mark.parametrize(
    ("dtype", "names"),
    [
        ("float64", ["rate", "schedule"]),
        pytest.param("float64", [*OPTIMIZERS], marks=pytest.mark.long),
        pytest.param("bfloat16", [*OPTIMIZERS], marks=pytest.mark.long),
    ],
)
@on_ranks(2, timeout=PATIENCE_S)
def test_deferred_updates_have_the_bits_of_plain_keras(dtype: str, names: list[str]) -> None:
    """The optimizers with which the weights differ from plain Keras'."""
    keras, hvd = shim()
    differ = []
    with floating(keras, dtype):
        for name in names:
            make = OPTIMIZERS[name]
            plain = fitted(keras, make(keras.optimizers), dtype)
            ours = fitted(keras, hvd.DistributedOptimizer(make(keras.optimizers)), dtype)
            if plain != ours:
                differ.append(name)
    assert differ == []


@on_ranks(2, timeout=PATIENCE_S)
def test_factors_are_of_the_gradients_type() -> None:
    """Relative errors of factors that float32 does not have."""
    tf, hvd = tf_shim()
    variable = tf.Variable([0.7], dtype=tf.float64)
    with hvd.DistributedGradientTape(tf.GradientTape(), gradient_predivide_factor=3.0) as tape:
        loss = variable * variable
    gradient = tape.gradient(loss, variable)
    x = tf.constant([1.0, 1.0], tf.float64)
    with tf.GradientTape() as plain:
        plain.watch(x)
        part = hvd.reducescatter(x, op=hvd.Sum, prescale_factor=THIRD)
    scattered = plain.gradient(part, x)
    errors = [
        abs(float(gradient[0]) / 1.4 - 1),
        *(abs(float(one) / (THIRD * hvd.size()) - 1) for one in scattered),  # as Horovod's
    ]
    assert max(errors) < 1e-15
