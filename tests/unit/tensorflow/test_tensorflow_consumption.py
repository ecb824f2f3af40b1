"""The order in which a step needs its variables, from its graph, in time that fits the graph."""

from __future__ import annotations

import time
from typing import Any

import pytest
from helpers.training.keras_jobs import MARKS

pytestmark = MARKS


def order_in(step: Any) -> tuple[list[int], float]:
    """What `step`, which is traced, returns as variables, by need; and the seconds it took."""
    import tensorflow as tf

    from hvd_order.tensorflow.gradients.consumption import consumption_order

    found: list[Any] = []

    @tf.function(autograph=False)
    def traced() -> None:
        variables = step()
        begin = time.process_time()
        found.extend([consumption_order(variables), time.process_time() - begin])

    traced.get_concrete_function()
    return found[0], found[1]


def residual(blocks: int, data: Any) -> Any:
    """A step on data from outside of it, with a sum of two ways in each block, the last first."""
    import tensorflow as tf

    weights = [tf.Variable(tf.eye(2)) for _ in range(blocks)]

    def step() -> list[Any]:
        x = data
        for weight in reversed(weights):
            x = x + x @ weight
        return weights

    return step


def test_captured_data_are_data() -> None:
    import tensorflow as tf

    order, _ = order_in(residual(5, tf.random.uniform([80, 2])))
    assert order == [4, 3, 2, 1, 0]


def test_sums_of_two_ways_do_not_double_the_work() -> None:
    import tensorflow as tf

    # A number is no data: all of it is made of variables alone.
    _, seconds = order_in(residual(25, tf.fill([2, 2], 1.0)))
    assert seconds < 1.0


def test_what_is_created_last_may_be_needed_first() -> None:
    import tensorflow as tf

    data, factor = tf.random.uniform([80, 2]), tf.random.uniform([])
    late, early, never = (tf.Variable(tf.eye(2)) for _ in range(3))

    def step() -> list[Any]:
        prepared = tf.transpose(late) * factor + never * 0.0  # joined with data at the end only
        x = data @ early
        tf.linalg.matmul(x, prepared)
        return [late, early, never]

    assert order_in(step)[0] == [1, 0, 2]


def test_of_two_branches_the_shorter_one_is_needed_first() -> None:
    import tensorflow as tf

    data = tf.random.uniform([80, 2])
    deep, shallow = (tf.Variable(tf.eye(2)) for _ in range(2))

    def step() -> list[Any]:
        x = data
        for _ in range(5):
            x = tf.nn.relu(x)
        tf.add(x @ deep, data @ shallow)
        return [deep, shallow]

    assert order_in(step)[0] == [1, 0]


@pytest.mark.parametrize("name", ["MobileNetV2", pytest.param("ResNet152", marks=pytest.mark.long)])
def test_networks_in_use(name: str) -> None:
    """Horovod's synthetic benchmark: forward, backward, data that the step refers to."""
    import keras
    import tensorflow as tf

    model = getattr(keras.applications, name)(weights=None, input_shape=(64, 64, 3))
    images = tf.random.uniform([2, 64, 64, 3])
    targets = tf.random.uniform([2, 1], 0, 999, tf.int64)
    variables = [variable._value for variable in model.trainable_variables]

    def step() -> list[Any]:
        with tf.GradientTape() as tape:
            loss = tf.keras.losses.sparse_categorical_crossentropy(
                targets, model(images, training=True)
            )
        tape.gradient(loss, variables)
        return variables

    order, seconds = order_in(step)
    assert seconds < 5.0
    paths = [model.trainable_variables[place].path for place in order]
    assert paths[0] in ("Conv1/kernel", "conv1_conv/kernel")
    assert paths[-2:] == ["predictions/kernel", "predictions/bias"]
