"""Mixed precision equals one process that averages the gradients of the ranks' parts.

A 16-bit gradient of a whole batch is rounded elsewhere than those of its parts. So the one process
computes each rank's part on the same weights, averages in float32 and applies that once: then what
is rounded is the same, and the weights have to be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.on_ranks import on_ranks
from helpers.training.keras_jobs import MARKS, PATIENCE_S, apart, dtype_policy, flat, shim

pytestmark = MARKS
BATCH = 12
STEPS = 10
OVERFLOWS_AT = 6  # in float16, on rank 0 alone
FIRST_SCALE = 2.0**12
GROWS_EVERY = 3
EAGER = {"tape"}  # of the ways; the others are compiled


def batches(policy: str) -> tuple[Any, Any]:
    """By step, row and feature."""
    random = np.random.default_rng(0)
    x, y = (
        random.uniform(-1, 1, (STEPS, BATCH, width)).astype(np.float32) * scale
        for width, scale in ((6, 1.0), (2, 0.3))
    )
    if policy == "mixed_float16":
        y[OVERFLOWS_AT, 0] = 1e6
    return x, y


def model_of(keras: Any) -> Any:
    keras.utils.set_random_seed(1)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(16, activation="tanh"),
            layers.Dense(2, dtype="float32"),
        ]
    )


def optimizer_of(keras: Any, policy: str) -> Any:
    inner = keras.optimizers.SGD(0.05, momentum=0.9)
    if policy == "mixed_bfloat16":
        return inner
    return keras.optimizers.LossScaleOptimizer(
        inner, initial_scale=FIRST_SCALE, dynamic_growth_steps=GROWS_EVERY
    )


class Seen:
    """Loss scale and number of updates, looked at after some steps and not after others."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.states: dict[int, tuple[float, int]] = {}

    def look(self, step: int) -> None:
        if step % 3 != 1:  # looking waits for the update of the step
            scale = getattr(self.optimizer, "dynamic_scale", None)
            self.states[step] = (
                1.0 if scale is None else float(scale.numpy()),
                int(self.optimizer.iterations.numpy()),
            )


Trained = tuple[Any, dict[int, tuple[float, int]]]


def gradients_of(model: Any, optimizer: Any, tape: Any, x: Any, y: Any) -> Any:
    """Of the loss, scaled as the optimizer wants it."""
    import tensorflow as tf

    with tape:
        loss = optimizer.scale_loss(tf.reduce_mean((model(x, training=True) - y) ** 2))
    return tape.gradient(loss, model.trainable_variables)


def train_alone(keras: Any, policy: str, parts: int, is_compiled: bool) -> Trained:
    """Compiled or not as what it is compared with: TensorFlow fuses ops of 16 bits in graphs."""
    import tensorflow as tf

    model, optimizer = model_of(keras), optimizer_of(keras, policy)
    seen = Seen(optimizer)

    def step(x: Any, y: Any) -> None:
        of_parts = [
            gradients_of(model, optimizer, tf.GradientTape(), x_part, y_part)
            for x_part, y_part in zip(tf.split(x, parts), tf.split(y, parts), strict=True)
        ]
        assert all(gradient.dtype == tf.float32 for part in of_parts for gradient in part)
        means = [tf.add_n(same) * (1 / parts) for same in zip(*of_parts, strict=True)]
        optimizer.apply(means, model.trainable_variables)

    run = tf.function(step) if is_compiled else step
    optimizer.build(model.trainable_variables)
    for number, (x, y) in enumerate(zip(*batches(policy), strict=True)):
        run(tf.constant(x), tf.constant(y))
        seen.look(number)
    return flat(model), seen.states


def train_in_a_loop(keras: Any, hvd: Any, policy: str, way: str) -> Trained:
    import tensorflow as tf

    import hvd_order.tensorflow as tf_hvd

    model, optimizer = model_of(keras), optimizer_of(keras, policy)
    seen = Seen(optimizer)
    if way == "tape":
        optimizer.build(model.trainable_variables)
    else:
        hvd.DistributedOptimizer(optimizer)

    def step(x: Any, y: Any) -> None:
        tape = tf.GradientTape()
        if way == "tape":
            tape = tf_hvd.DistributedGradientTape(tape)
        gradients = gradients_of(model, optimizer, tape, x, y)
        optimizer.apply(gradients, model.trainable_variables)

    ways: dict[str, Callable[..., Any]] = {
        "optimizer": tf.function, "overlapped": hvd.overlapped_function,
    }  # fmt: skip
    run = step if way in EAGER else ways[way](step)
    for number, (x, y) in enumerate(zip(*batches(policy), strict=True)):
        x, y = (np.split(rows, hvd.size())[hvd.rank()] for rows in (x, y))
        run(tf.constant(x), tf.constant(y))
        seen.look(number)
    hvd.flush()
    return flat(model), seen.states


def train_by_fit(keras: Any, hvd: Any, policy: str, wrapped_by_keras: bool) -> Trained:
    """With a loss scale that compile() adds by itself, or one of ours."""
    model, optimizer = model_of(keras), optimizer_of(keras, policy)
    if wrapped_by_keras:
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    hvd.DistributedOptimizer(optimizer)
    model.compile(optimizer, loss="mse", jit_compile=False)
    if model.optimizer is not optimizer:
        model.optimizer.initial_scale = FIRST_SCALE
        model.optimizer.dynamic_growth_steps = GROWS_EVERY
    seen = Seen(model.optimizer)

    class Look(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.look(batch)

    x, y = (
        np.concatenate([np.split(batch, hvd.size())[hvd.rank()] for batch in rows])
        for rows in batches(policy)
    )
    model.fit(x, y, batch_size=BATCH // hvd.size(), shuffle=False, verbose=0, callbacks=[Look()])
    return flat(model), seen.states


@pytest.mark.parametrize(
    ("size", "policy", "ways"),
    [
        (2, "mixed_float16", ["fit", "fit_wrapped_by_keras", "optimizer", "tape", "overlapped"]),
        (3, "mixed_bfloat16", ["fit", "optimizer"]),
    ],
)
@on_ranks(timeout=PATIENCE_S)
def test_mixed_precision_equals_one_process(policy: str, ways: list[str]) -> None:
    """By way, how far weights are from one process's and ranks apart, and what was seen of both."""
    keras, hvd = shim()
    results = {}
    with dtype_policy(keras, policy):
        alone = {
            is_compiled: train_alone(keras, policy, hvd.size(), is_compiled)
            for is_compiled in {way not in EAGER for way in ways}
        }
        for way in ways:
            wanted, wanted_states = alone[way not in EAGER]
            if way.startswith("fit"):
                got, states = train_by_fit(keras, hvd, policy, way == "fit_wrapped_by_keras")
            else:
                got, states = train_in_a_loop(keras, hvd, policy, way)
            results[way] = (*apart(got, wanted), states, wanted_states)
    found = results
    assert list(found) == ways
    for way, (from_one_process, between_ranks, states, wanted_states) in found.items():
        assert states == wanted_states, way
        assert from_one_process < 1e-6, way
        assert between_ranks == 0.0, way
        if policy == "mixed_float16":
            check_scale(states)


def check_scale(states: dict[int, tuple[float, int]]) -> None:
    """The loss scale has grown, and was halved by the step that was left out."""
    assert states[OVERFLOWS_AT - 1] == (4 * FIRST_SCALE, OVERFLOWS_AT)
    assert states[OVERFLOWS_AT] == (2 * FIRST_SCALE, OVERFLOWS_AT)
    assert states[STEPS - 1] == (4 * FIRST_SCALE, STEPS - 1)
