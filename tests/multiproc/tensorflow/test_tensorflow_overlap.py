"""Updates that the next step applies: nobody sees that they are late, and they do come late."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.logged import logged
from helpers.on_ranks import on_ranks
from helpers.ranks import RankFactory
from helpers.training.keras_jobs import MARKS, PATIENCE_S, flat, shim, tf_shim

pytestmark = MARKS
BATCH = 12
ROWS = 5 * BATCH


def rows_of(rank: int, size: int, whole: bool = False) -> tuple[Any, Any]:
    """A rank's part of every batch; with whole numbers, or numbers from 0 to 1."""
    random = np.random.default_rng(0)
    words, wanted = random.integers(0, 6, (ROWS, 6)), random.normal(size=(ROWS, 2))
    words = words if whole else words / 5
    parts = (
        rows.reshape(-1, size, BATCH // size, rows.shape[-1])[:, rank].reshape(-1, rows.shape[-1])
        for rows in (words.astype(np.float32), wanted.astype(np.float32))
    )
    return next(parts), next(parts)


# ---- models ------------------------------------------------------------------------------------


def functional(keras: Any) -> Any:
    """With a branch, a shared layer, and layers that are made in another order than they run."""
    last, shared = keras.layers.Dense(2), keras.layers.Dense(6, activation="tanh")
    entry = keras.Input((6,))
    left = shared(entry)
    right = keras.layers.Dense(6, activation="tanh")(shared(left))
    return keras.Model(entry, last(keras.layers.Add()([left, right])))


def with_words(keras: Any) -> Any:
    """With a table, whose gradient is sparse, a normalization, and dropout of nothing."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            layers.Embedding(6, 4),
            layers.Flatten(),
            layers.LayerNormalization(),
            layers.Dense(2),
        ]
    )


def recurrent(keras: Any) -> Any:
    """Reads its variables inside of a loop of the graph."""
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((6,)), layers.Reshape((3, 2)), layers.LSTM(4), layers.Dense(2)]
    )


def subclassed(keras: Any) -> Any:
    class Own(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.second = keras.layers.Dense(2, kernel_regularizer="l2")
            self.first = keras.layers.Dense(5, activation="tanh", kernel_constraint="max_norm")

        def call(self, x: Any) -> Any:
            return self.second(self.first(x))

    return Own()


def plain(keras: Any) -> Any:
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((6,)), layers.Dense(5, activation="tanh"), layers.Dense(2)]
    )


MODELS: dict[str, Callable[[Any], Any]] = {
    made.__name__: made for made in (functional, with_words, recurrent, subclassed, plain)
}


# ---- what a callback sees ----------------------------------------------------------------------


def watching(keras: Any, everything: bool) -> Any:
    """Notes how many updates are deferred after each batch and, if asked for, all variables."""
    from hvd_order.tensorflow.gradients import deferred_updates

    class Watch(keras.callbacks.Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.deferred: list[int] = []
            self.seen: list[Any] = []

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.model.optimizer.learning_rate = 0.1 / (1 + batch)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.deferred.append(len(deferred_updates.pending))
            if everything:
                optimizer = self.model.optimizer
                self.seen += [
                    v.numpy().ravel() for v in (*self.model.weights, *optimizer.variables)
                ]

    return Watch()


def distance(wanted: Any, got: Any) -> float:
    """The largest difference, of what is beyond 1 relative to its largest."""
    wanted, got = np.asarray(wanted), np.asarray(got)
    return float(np.abs(wanted - got).max() / max(1.0, np.abs(wanted).max()))


def fitted(kind: str, everything: bool, settings: dict[str, Any], together: bool) -> Any:
    """Trains; what was deferred, what was seen, the history, and predictions and weights."""
    keras, hvd = shim()
    rank, size = (hvd.rank(), hvd.size()) if together else (0, 1)
    keras.utils.set_random_seed(1)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model = MODELS[kind](keras)
    if together:
        hvd.DistributedOptimizer(optimizer)
    model.compile(optimizer, loss="mse", metrics=["mae"], jit_compile=False, **settings)
    watch = watching(keras, everything)
    x, y = rows_of(rank, size, kind == "with_words")
    test = rows_of(0, 1, kind == "with_words")
    history = model.fit(
        x, y, batch_size=BATCH // size, epochs=2, shuffle=False, verbose=0,
        validation_data=test, validation_batch_size=ROWS,
        callbacks=[watch, *([hvd.callbacks.MetricAverageCallback()] if together else [])],
    )  # fmt: skip
    final = [model.predict(test[0], verbose=0), *model.get_weights()]
    return watch.deferred, watch.seen, history.history, final


def body_alone(kind: str, everything: bool, settings: dict[str, Any]) -> Any:
    """One process; the other ranks have better things to do."""
    _, hvd = tf_shim()
    return fitted(kind, everything, settings, together=False) if hvd.rank() == 0 else None


def body_fit(kind: str, everything: bool, settings: dict[str, Any], alone: Any) -> dict[str, Any]:
    """The largest differences of all that can be seen from training in one process."""
    _, wanted_seen, wanted_history, wanted = alone
    deferred, seen, history, got = fitted(kind, everything, settings, together=True)
    assert list(history) == list(wanted_history)
    differences = {
        "weights": [distance(a, b) for a, b in zip(wanted, got, strict=True)],
        "seen": [distance(a, b) for a, b in zip(wanted_seen, seen, strict=True)],
        "history": [
            distance(wanted_history[name], history[name])
            for name in wanted_history
            if name.startswith("val_") or name == "loss"
        ],
    }
    return {
        "deferred": deferred,
        "differences": {
            what: float(max(values, default=0)) for what, values in differences.items()
        },
        "weights": np.concatenate([part.ravel() for part in got]).tobytes(),
    }


@pytest.fixture(scope="module")
def alone(ranks: RankFactory) -> Callable[..., Any]:
    """What one process makes of a model; each is trained once."""

    @functools.cache
    def train(kind: str, everything: bool, **settings: Any) -> Any:
        return ranks(2).run(body_alone, kind, everything, settings, timeout=PATIENCE_S)[0]

    return train


@pytest.mark.parametrize(
    ("size", "kind", "everything", "settings"),
    [
        *((2, kind, False, {}) for kind in ("functional", "recurrent")),
        (2, "with_words", True, {}),
        *(
            pytest.param(2, kind, False, {}, marks=pytest.mark.long)
            for kind in ("subclassed", "plain")
        ),
        (3, "plain", False, {}),
        (2, "plain", False, {"steps_per_execution": 2}),
    ],
)
def test_fit_overlaps_and_equals_one_process(
    ranks: RankFactory,
    alone: Callable[..., Any],
    size: int,
    kind: str,
    everything: bool,
    settings: dict[str, Any],
) -> None:
    reference = alone(kind, everything, **settings)
    results = ranks(size).run(body_fit, kind, everything, settings, reference, timeout=PATIENCE_S)
    for result in results:
        assert set(result["deferred"]) == {1}
        assert max(result["differences"].values()) < 1e-6, result["differences"]
    assert len({result["weights"] for result in results}) == 1


# ---- steps that cannot be left to the next -------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("reads", "goes on with 'kernel' after the update"),
        ("accumulates", "accumulates gradients"),
        ("xla", "XLA has no operators that communicate"),
    ],
)
@on_ranks(2, timeout=PATIENCE_S)
def test_what_cannot_wait_is_said_and_right(kind: str, reason: str) -> None:
    """What is said, and how far the weights are from one process's."""
    import tensorflow as tf

    keras, hvd = shim()

    class ReadsAfterwards(keras.Model):  # type: ignore[misc]
        """Two updates a step, of which the second depends on the first."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = keras.layers.Dense(2)

        def call(self, x: Any) -> Any:
            return self.layer(x)

        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x) - y) ** 2)
            own = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, own), own)
            return {"loss": loss, "norm": tf.reduce_sum(self.layer.kernel)}

    trained = []
    with logged() as said:
        for distributed in (False, True):
            keras.utils.set_random_seed(1)
            rank, size = (hvd.rank(), hvd.size()) if distributed else (0, 1)
            model = ReadsAfterwards() if kind == "reads" else plain(keras)
            optimizer = keras.optimizers.SGD(
                0.05, gradient_accumulation_steps=2 if kind == "accumulates" else None
            )
            if distributed:
                hvd.DistributedOptimizer(optimizer)
            model.compile(optimizer, loss="mse", jit_compile=distributed and kind == "xla")
            x, y = rows_of(rank, size)
            model.fit(x, y, batch_size=BATCH // size, epochs=2, shuffle=False, verbose=0)
            trained.append(flat(model))
    said = "\n".join(said)
    difference = float(np.abs(trained[0] - trained[1]).max())
    assert reason in said
    assert difference < 1e-6


# ---- loops of one's own --------------------------------------------------------------------------


def trained_by_turns(together: bool) -> tuple[Any, set[int]]:
    """Two models, as adversaries: each step reads what the other has changed.

    Returns:
        All variables, and how many updates were deferred after each step.
    """
    import tensorflow as tf

    from hvd_order.tensorflow.gradients import deferred_updates

    keras, hvd = shim()
    keras.utils.set_random_seed(1)
    first, second = plain(keras), plain(keras)
    optimizers = [keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1, momentum=0.9)]
    steps = []
    for model, other, optimizer in zip((first, second), (second, first), optimizers, strict=True):
        if together:
            hvd.DistributedOptimizer(optimizer)

        def step(x: Any, y: Any, model=model, other=other, optimizer=optimizer) -> Any:  # type: ignore[no-untyped-def]
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) + 0.5 * other(x) - y) ** 2)
                if loss > 100.0:  # of a tensor: AutoGraph has to see this function
                    loss = 0.01 * loss
            own = model.trainable_variables
            optimizer.apply(tape.gradient(loss, own), own)
            return loss

        steps.append(hvd.overlapped_function(step) if together else tf.function(step))
    rank, size = (hvd.rank(), hvd.size()) if together else (0, 1)
    x, y = rows_of(rank, size)
    width = BATCH // size
    deferred = set()
    for start in range(0, len(x), width):
        for step in steps * 2 if start else steps:
            step(tf.constant(x[start : start + width]), tf.constant(y[start : start + width]))
            deferred.add(len(deferred_updates.pending))
    hvd.flush()
    assert not deferred_updates.pending
    variables = [*first.weights, *second.weights, *optimizers[0].variables]
    return np.concatenate([np.ravel(v.numpy()) for v in variables]), deferred


@on_ranks(2, timeout=PATIENCE_S)
def test_functions_of_ones_own_overlap() -> None:
    import tensorflow as tf

    with logged(tf.get_logger().name) as said:
        alone, _ = trained_by_turns(together=False)
        ours, deferred = trained_by_turns(together=True)
    found = {
        "difference": float(np.abs(alone - ours).max()),
        "deferred": deferred,
        "warnings": [line for line in said if "AutoGraph" in line],
    }
    assert found["difference"] < 1e-6
    assert found["deferred"] == {1}
    assert found["warnings"] == []


# ---- when fit ends early -------------------------------------------------------------------------


@on_ranks(2, timeout=PATIENCE_S)
def test_fit_that_ends_early_leaves_nothing_behind() -> None:
    """Data of unknown length, an exception in a callback, saving in the middle of an epoch."""
    import tensorflow as tf

    from hvd_order.tensorflow.gradients import deferred_updates

    keras, hvd = shim()
    x, y = rows_of(hvd.rank(), hvd.size())
    model = plain(keras)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
    data = tf.data.Dataset.from_generator(
        lambda: zip(x[:20].reshape(5, 4, 6), y[:20].reshape(5, 4, 2), strict=True),
        output_signature=(tf.TensorSpec((4, 6)), tf.TensorSpec((4, 2))),
    )
    model.fit(data, epochs=3, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 15
    assert not deferred_updates.pending

    class Stop(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 2:
                raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        model.fit(data, verbose=0, callbacks=[Stop()])
    assert deferred_updates.pending
    assert int(model.optimizer.iterations.numpy()) == 18  # who looks gets all that was computed
    assert not deferred_updates.pending
    model.fit(data, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 23
    everyone = np.asarray(hvd.allgather(model.get_weights()[0][None]))
    assert np.ptp(everyone, axis=0).max() == 0.0


@on_ranks(2, timeout=PATIENCE_S)
def test_overlap_can_be_switched_off() -> None:
    """How many updates are deferred after each step."""
    import hvd_order.tensorflow as tf_hvd

    tf_hvd.init()
    tf_hvd.shutdown()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HVD_ORDER_CROSS_ITERATION", "0")
        keras, hvd = shim()
        model = plain(keras)
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
        watch = watching(keras, everything=False)
        x, y = rows_of(hvd.rank(), hvd.size())
        model.fit(x, y, batch_size=BATCH // hvd.size(), verbose=0, callbacks=[watch])
    hvd.shutdown()
    deferred = watch.deferred
    assert deferred == [0] * (ROWS // BATCH)


# ---- order ---------------------------------------------------------------------------------------


@on_ranks(2, timeout=PATIENCE_S)
def test_order_of_consumption_is_that_of_the_graph() -> None:
    """The layers in the order of their first variables, and what comes last."""
    import keras
    import tensorflow as tf

    from hvd_order.tensorflow.gradients.consumption import consumption_order

    layers = keras.layers
    last, first = layers.Dense(2, name="last"), layers.Conv1D(3, 2, name="first")
    table, loop = layers.Embedding(5, 4, name="table"), layers.LSTM(3, name="loop")
    entry = keras.Input((6,), dtype="int32")
    model = keras.Model(entry, last(loop(first(table(entry)))))
    variables = [v for layer in (last, loop, first, table) for v in layer.trainable_variables]
    unused = tf.Variable(1.0)
    names: list[str] = []

    @tf.function
    def step(x: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x)) + 1e-3 * tf.add_n([tf.nn.l2_loss(v) for v in variables])
        tape.gradient(loss, [v.value for v in variables])
        order = consumption_order([v.value for v in variables] + [unused])
        known = [*(v.path.split("/")[0] for v in variables), "unused"]
        names.extend(known[i] for i in order)

    step(tf.zeros([2, 6], tf.int32))
    found = list(dict.fromkeys(names[:-1])), names[-1]
    assert found == (["table", "first", "loop", "last"], "unused")


@on_ranks(2, timeout=PATIENCE_S)
def test_shutdown_applies_the_last_updates() -> None:
    """Nothing but shutdown() follows the last step; how far the weights are from one process's."""
    import tensorflow as tf

    keras, hvd = shim()
    trained = []
    for distributed in (False, True):
        keras.utils.set_random_seed(1)
        model = plain(keras)
        optimizer = keras.optimizers.SGD(0.1)
        if distributed:
            hvd.DistributedOptimizer(optimizer)

        def step(x: Any, y: Any, model: Any = model, optimizer: Any = optimizer) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - y) ** 2)
            own = model.trainable_variables
            optimizer.apply(tape.gradient(loss, own), own)

        x, y = rows_of(hvd.rank(), hvd.size()) if distributed else rows_of(0, 1)
        run = hvd.overlapped_function(step) if distributed else tf.function(step)
        for _ in range(3):
            run(tf.constant(x), tf.constant(y))
        if distributed:
            hvd.shutdown()
        trained.append(flat(model))
    difference = float(np.abs(trained[0] - trained[1]).max())
    assert difference < 1e-6
