"""``model.fit`` where its updates cannot be left to the next step, or its data end in between."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.logged import logged
from helpers.on_ranks import on_ranks
from helpers.ranks import RankFactory
from helpers.training.keras_jobs import MARKS, PATIENCE_S, shim

pytestmark = MARKS
BATCH = 4


def rows(batches: int, rank: int) -> tuple[Any, Any]:
    random = np.random.default_rng(rank)
    x = random.normal(size=(batches * BATCH, 6)).astype(np.float32)
    return x, (x[:, :2] > 0).astype(np.float32)


def looking_back(keras: Any) -> Any:
    """A model whose step uses a weight after the update, so it cannot be left to the next one."""
    import tensorflow as tf

    class Own(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(2, activation="softmax")

        def call(self, x: Any) -> Any:
            return self.dense(x)

        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                predicted = self(x, training=True)
                loss = self.compute_loss(x, y, predicted)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            results = self.compute_metrics(x, y, predicted)
            return {**results, "norm": tf.norm(self.dense.kernel)}

    return Own()


def plain(keras: Any) -> Any:
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(2, activation="softmax")])


def history(
    keras: Any, model: Any, optimizer: Any, batches: int, rank: int, **options: Any
) -> dict[str, list[float]]:
    model.compile(optimizer, loss="mse", metrics=["accuracy"], **options)
    x, y = rows(batches, rank)
    found = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    return {name: [float(value) for value in values] for name, values in found.history.items()}


# ---- metrics: after a refused trace, and with several steps a call ------------------------------


@pytest.mark.parametrize(
    ("size", "reads", "steps", "batches"),
    [(2, False, 4, 11), (2, False, 4, 3), (2, True, 4, 11), (2, True, 1, 5), (1, True, 1, 5)],
)
@on_ranks(timeout=PATIENCE_S)
def test_metrics_are_those_of_keras(reads: bool, steps: int, batches: int) -> None:
    """What fit() reports with our optimizer, and with the user's own, on the same rows."""
    keras, hvd = shim()
    results = []
    for wrapped in (True, False):
        keras.utils.set_random_seed(1)
        model = looking_back(keras) if reads else plain(keras)
        optimizer = keras.optimizers.SGD(0.1)
        if wrapped:
            hvd.DistributedOptimizer(optimizer)
        results.append(history(keras, model, optimizer, batches, 0, steps_per_execution=steps))
    ours, own = results
    for name in ("loss", "accuracy"):
        np.testing.assert_allclose(ours[name], own[name], rtol=1e-5, err_msg=name)


# ---- models with several optimizers --------------------------------------------------------------


def adversarial(keras: Any, together: bool) -> Any:
    """Two networks, each with an optimizer of its own; ``model.optimizer`` is not wrapped."""
    import tensorflow as tf

    class Pair(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.maker, self.judge = keras.layers.Dense(6), keras.layers.Dense(1)

        def compile(self, makers: Any, judges: Any, **options: Any) -> None:
            super().compile(loss="mse", **options)
            self.makers, self.judges = makers, judges

        def call(self, x: Any) -> Any:
            return self.judge(self.maker(x))

        def losses_of(self, x: Any) -> Any:
            made = tf.reduce_mean((self(x) - 1.0) ** 2)
            return made, tf.reduce_mean((self.judge(x) - 1.0) ** 2) + tf.reduce_mean(self(x) ** 2)

        def train_step(self, data: Any) -> Any:
            x, _ = data
            made, judged = self.maker.trainable_variables, self.judge.trainable_variables
            with tf.GradientTape(persistent=True) as tape:
                first, second = self.losses_of(x)
            gradients = tape.gradient(second, judged)
            if together:
                others = tape.gradient(first, made)
                self.judges.apply_gradients(zip(gradients, judged, strict=True))
            else:
                self.judges.apply_gradients(zip(gradients, judged, strict=True))
                with tf.GradientTape() as tape:
                    first, _ = self.losses_of(x)
                others = tape.gradient(first, made)
            self.makers.apply_gradients(zip(others, made, strict=True))
            return {"made": first, "judged": second}

    return Pair()


def body_adversarial(together: bool, jit: Any) -> tuple[list[Any], list[int], list[str]]:
    keras, hvd = shim()
    from hvd_order.tensorflow.gradients import deferred_updates

    deferred: list[int] = []
    count = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: deferred.append(len(deferred_updates.pending))
    )
    keras.utils.set_random_seed(1)
    model = adversarial(keras, together)
    model(np.zeros((1, 6), np.float32))
    optimizers = [hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)) for _ in range(2)]
    model.compile(*optimizers, jit_compile=jit)
    x, y = rows(4, hvd.rank())
    with logged() as lines:
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[count])
    return [v.numpy() for v in model.trainable_variables], deferred, lines


def body_adversarial_alone(size: int) -> list[Any]:
    """The same in one process, on the batches of all ranks."""
    keras, _ = shim()
    keras.utils.set_random_seed(1)
    model = adversarial(keras, together=True)
    model(np.zeros((1, 6), np.float32))
    model.compile(keras.optimizers.SGD(0.05), keras.optimizers.SGD(0.05), jit_compile=False)
    parts = [[np.split(one, 4) for one in rows(4, rank)] for rank in range(size)]
    x, y = (np.concatenate([p[i][b] for b in range(4) for p in parts]) for i in range(2))
    model.fit(x, y, batch_size=BATCH * size, shuffle=False, verbose=0)
    return [v.numpy() for v in model.trainable_variables]


@pytest.mark.parametrize("jit", ["auto", True])
def test_two_optimizers_overlap(ranks: RankFactory, jit: Any) -> None:
    (wanted,) = ranks(1).run(body_adversarial_alone, 2, timeout=PATIENCE_S)
    for got, deferred, lines in ranks(2).run(body_adversarial, True, jit, timeout=PATIENCE_S):
        assert deferred == [1] * 4
        assert ("XLA has no operators" in "".join(lines)) == (jit is True)
        for mine, theirs in zip(got, wanted, strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-5)


@pytest.mark.parametrize("size", [1, 2])
def test_two_optimizers_one_after_the_other_say_why_not(ranks: RankFactory, size: int) -> None:
    found = ranks(size).run(body_adversarial, False, True, timeout=PATIENCE_S)
    for got, deferred, lines in found:
        assert deferred == [0] * 4
        assert size == 1 or "after the update" in "".join(lines)
        for mine, theirs in zip(got, found[0][0], strict=True):
            np.testing.assert_array_equal(mine, theirs)


@on_ranks(2, timeout=PATIENCE_S)
def test_an_optimizer_that_the_model_hides_is_told() -> None:
    keras, hvd = shim()
    import tensorflow as tf

    hidden = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05))

    class Hiding(keras.Sequential):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            hidden.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    model = Hiding([keras.Input((6,)), keras.layers.Dense(2)])
    model.compile("sgd", loss="mse")
    with logged() as lines:
        model.fit(*rows(3, hvd.rank()), batch_size=BATCH, verbose=0)
    (line,) = [one for one in lines if "within each step" in one]
    assert "no attribute of Hiding" in line


# ---- nothing to train ----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("wrapped", [False, True])
@on_ranks(timeout=PATIENCE_S)
def test_a_frozen_model_needs_no_exchange(wrapped: bool) -> None:
    keras, hvd = shim()
    model = plain(keras)
    model.trainable = False
    optimizer = keras.optimizers.SGD(0.1)
    if wrapped:
        hvd.DistributedOptimizer(optimizer)
    model.compile(optimizer, loss="mse")
    begin = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(*rows(3, hvd.rank()), batch_size=BATCH, epochs=2, verbose=0, callbacks=[begin])
    kernels = hvd.allgather(model.weights[0].numpy()[None])
    np.testing.assert_array_equal(kernels[0], kernels[-1])
