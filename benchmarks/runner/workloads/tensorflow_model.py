"""The emulated device (emulated_device.py) for Keras: layers of the real sizes that sleep."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks.runner.workloads.profiles import Layer, Profile
from benchmarks.runner.workloads.recorder import Recorder


def _asleep(name: str, kind: str, seconds: float, recorder: Recorder) -> Callable[..., np.ndarray]:
    def sleep(x: np.ndarray, *_: np.ndarray) -> np.ndarray:
        begin = time.monotonic()
        time.sleep(seconds)
        recorder.events.append((name, kind, begin, time.monotonic()))
        return x

    return sleep


class EmulatedLayer(keras.layers.Layer):  # type: ignore[misc]
    """One layer of a profile."""

    def __init__(self, profile: Layer, push: float, recorder: Recorder) -> None:
        """``push``: scale of this rank's gradient."""
        super().__init__(name=profile.name.replace("/", "_"))
        self._profile = profile
        self._push = push
        self._forward = _asleep(profile.name, "forward", profile.forward_s, recorder)
        self._backward = _asleep(profile.name, "backward", profile.backward_s, recorder)

    def build(self, input_shape: Any) -> None:
        """Makes the variables."""
        for i, size in enumerate(self._profile.tensors):
            self.add_weight(shape=(size,), initializer="zeros", name=f"tensor{i}")

    def call(self, x: Any) -> Any:
        """Reads the first element of each variable, and sleeps."""

        def sleep(function: Callable[..., np.ndarray], x: Any, *after: Any) -> Any:
            # Not stateful: TensorFlow would let no two of these run at once, in any model.
            y = tf.numpy_function(function, [x, *after], tf.float32, stateful=False)
            y.set_shape(x.shape)
            return y

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def run(x: Any, *values: Any) -> Any:
            seen = [value[0] for value in values]
            y = sleep(self._forward, x + seen[0])

            def gradients(dy: Any) -> Any:
                # The gradient of the loss is a constant; what has constants alone before it is
                # computed once, when the graph is optimized.
                dx = sleep(self._backward, dy, y)
                mine = [
                    tf.fill(value.shape, dx[0, 0] * self._push * (1.0 + one))
                    for value, one in zip(values, seen, strict=True)
                ]
                return dx, *mine

            return y, gradients

        return run(x, *[tf.convert_to_tensor(weight) for weight in self.trainable_weights])


class EmulatedModel(keras.Sequential):  # type: ignore[misc]
    """All layers of a profile, one after the other.

    Attributes:
        wrap_tape: None, or what wraps a gradient tape, as Horovod wants it.
    """

    def __init__(self, profile: Profile, rank: int) -> None:
        """``rank``: ranks get different gradients, as different data would give."""
        self.recorder = Recorder()
        layers = [EmulatedLayer(one, 1e-3 * (1 + rank), self.recorder) for one in profile.layers]
        super().__init__([keras.Input((1,)), *layers])
        self.wrap_tape: Callable[[Any], Any] | None = None

    def train_step(self, data: Any) -> Any:
        """As Keras', or with a wrapped tape."""
        if self.wrap_tape is None:
            return super().train_step(data)
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        tape = self.wrap_tape(tape)
        variables = self.trainable_variables  # Horovod 0.28 knows TensorFlow's own alone
        self.optimizer.apply(tape.gradient(loss, [v.value for v in variables]), variables)
        return {"loss": loss}


def sum_of_outputs(_: Any, y: Any) -> Any:
    """The loss."""
    return tf.reduce_sum(y, axis=-1)
