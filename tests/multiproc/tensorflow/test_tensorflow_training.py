"""Training with Keras 3 and with loops of one's own equals one process on the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.on_ranks import on_ranks
from helpers.ranks import RankFactory, start_script
from helpers.training.keras_jobs import MARKS, PATIENCE_S, apart, flat, shim, tf_shim

pytestmark = MARKS
BATCH = 12


def data() -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    shapes = ((4 * BATCH, 6), (4 * BATCH, 2))
    x, y = (random.normal(size=shape).astype(np.float32) for shape in shapes)
    return x, y


def share(rows: Any, rank: int, size: int) -> Any:
    """A rank's part of every batch."""
    return rows.reshape(-1, size, BATCH // size, rows.shape[-1])[:, rank].reshape(
        -1, rows.shape[-1]
    )


def dense_model(keras: Any) -> Any:
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.Dense(2),
        ]
    )


def optimizers(keras: Any) -> dict[str, Callable[[], Any]]:
    o = keras.optimizers
    return {
        "momentum": lambda: o.SGD(0.1, momentum=0.9),
        "adam": lambda: o.Adam(o.schedules.ExponentialDecay(0.01, 4, 0.5)),
        "adamw_clipnorm": lambda: o.AdamW(0.01, clipnorm=0.05),
        "global_clipnorm": lambda: o.SGD(0.1, global_clipnorm=0.05),
        "clipvalue": lambda: o.SGD(0.1, clipvalue=0.01),
        "accumulation": lambda: o.Adam(0.01, gradient_accumulation_steps=2),
        "moving_average": lambda: o.SGD(0.1, use_ema=True, ema_overwrite_frequency=3),
        "loss_scaling": lambda: o.LossScaleOptimizer(o.SGD(0.1, momentum=0.9)),
    }


def fitted(name: str, settings: dict[str, Any], together: bool) -> tuple[Any, Any]:
    """Weights and losses of a training with this optimizer."""
    keras, hvd = shim()
    rank, size = (hvd.rank(), hvd.size()) if together else (0, 1)
    optimizer = optimizers(keras)[name]()
    model = dense_model(keras)
    callbacks = []
    if together:
        assert hvd.DistributedOptimizer(optimizer) is optimizer
        callbacks = [
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
        ]
    if rank > 0:  # the callback has to undo this
        for variable in model.weights:
            variable.assign(variable + 1.0)
    model.compile(optimizer, loss="mse", jit_compile=False, **settings)
    x, y = data()
    history = model.fit(
        share(x, rank, size), share(y, rank, size), batch_size=BATCH // size, epochs=2,
        shuffle=False, verbose=0, callbacks=callbacks,
    )  # fmt: skip
    return flat(model), history.history["loss"]


def body_alone(names: list[str]) -> dict[str, tuple[Any, Any]]:
    """By optimizer, what one process makes of it; the other ranks have better things to do."""
    _, hvd = tf_shim()
    return {name: fitted(name, {}, together=False) for name in names if hvd.rank() == 0}


def body_fit(
    alone: dict[str, tuple[Any, Any]], settings: dict[str, Any]
) -> dict[str, tuple[float, float]]:
    """By optimizer, how far the weights are from one process's, and from the other ranks'."""
    found = {}
    for name, (wanted, wanted_losses) in alone.items():
        ours, losses = fitted(name, settings, together=True)
        np.testing.assert_allclose(losses, wanted_losses, rtol=1e-5)
        found[name] = apart(ours, wanted)
    return found


def check(results: list[dict[str, tuple[float, float]]], names: list[str]) -> None:
    for found in results:
        assert list(found) == names
        for name, (from_one_process, between_ranks) in found.items():
            assert from_one_process < 1e-6, name
            assert between_ranks == 0.0, name


ALL = [
    "momentum", "adam", "adamw_clipnorm", "global_clipnorm", "clipvalue", "accumulation",
    "moving_average", "loss_scaling",
]  # fmt: skip


@pytest.fixture(scope="module")
def alone(ranks: RankFactory) -> dict[str, tuple[Any, Any]]:
    """By optimizer, what one process makes of it."""
    trained: dict[str, tuple[Any, Any]] = ranks(2).run(body_alone, ALL, timeout=PATIENCE_S)[0]
    return trained


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.long), 3])
def test_fit_equals_one_process(
    ranks: RankFactory, alone: dict[str, tuple[Any, Any]], size: int
) -> None:
    check(ranks(size).run(body_fit, alone, {}, timeout=PATIENCE_S), ALL)


@pytest.mark.parametrize(
    "settings",
    [{"run_eagerly": True}, {"steps_per_execution": 2}],
    ids=["eager", "several_steps"],
)
def test_fit_in_other_ways(
    ranks: RankFactory, alone: dict[str, tuple[Any, Any]], settings: dict[str, Any]
) -> None:
    names = ["momentum", "accumulation"]
    some = {name: alone[name] for name in names}
    check(ranks(2).run(body_fit, some, settings, timeout=PATIENCE_S), names)


def own_step(variables: list[Any], compression: str | None) -> Callable[[Any, Any, Any], None]:
    """A step of a loop of one's own: dense and sparse gradients, and one that does not exist."""
    import tensorflow as tf

    import hvd_order.tensorflow as hvd

    table, kernel, _ = variables

    def step(words: Any, x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.gather(table, words) * x @ kernel - y) ** 2)
        if compression is not None:
            kind = getattr(hvd.Compression, compression)
            tape = hvd.DistributedGradientTape(tape, compression=kind)
        of_table, of_kernel, missing = tape.gradient(loss, variables)
        assert missing is None
        assert isinstance(of_table, tf.IndexedSlices)
        table.scatter_sub(tf.IndexedSlices(0.1 * of_table.values, of_table.indices))
        kernel.assign_sub(0.1 * of_kernel)

    return step


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
@on_ranks(2, timeout=PATIENCE_S)
def test_a_loop_of_ones_own(traced: bool) -> None:
    """By compression, how far the weights are from one process's."""
    tf, hvd = tf_shim()
    width = BATCH // hvd.size()
    x, y = data()
    words = np.arange(len(x)) % 5
    trained = {}
    for compression in (None, "none", "bf16"):
        variables = [
            tf.Variable(tf.ones([5, 6])),
            tf.Variable(tf.reshape(tf.linspace(-1.0, 1.0, 12), [6, 2])),
            tf.Variable(1.0),
        ]
        step = own_step(variables, compression)
        run = tf.function(step) if traced else step
        for start in range(0, len(x), BATCH):
            rows = slice(start, start + BATCH)
            if compression is not None:
                first = start + hvd.rank() * width
                rows = slice(first, first + width)
            run(tf.constant(words[rows]), tf.constant(x[rows]), tf.constant(y[rows]))
        trained[compression] = np.concatenate([v.numpy().ravel() for v in variables])
    found = {kind: float(np.abs(trained[kind] - trained[None]).max()) for kind in ("none", "bf16")}
    assert found["none"] < 1e-6
    assert 0.0 < found["bf16"] < 1e-2


@on_ranks(2, timeout=PATIENCE_S)
def test_gradients_that_are_not_reduced_are_found() -> None:
    keras, hvd = shim()
    from hvd_order.base.errors import HvdOrderError

    class Own(keras.optimizers.SGD):  # type: ignore[misc]
        """Applies gradients in its own way, past every hook."""

        def apply(self, grads: Any, trainable_variables: Any = None) -> None:
            for gradient, variable in zip(grads, trainable_variables, strict=True):
                variable.assign_sub(0.1 * gradient)

    x, y = data()
    messages = []
    for optimizer, callbacks in (
        (hvd.DistributedOptimizer(Own()), []),
        (keras.optimizers.SGD(), [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]),
    ):
        model = dense_model(keras)
        model.compile(optimizer, loss="mse")
        with pytest.raises(HvdOrderError) as caught:
            model.fit(x, y, epochs=1, verbose=0, callbacks=callbacks)
        messages.append(str(caught.value))
    own, forgotten = messages
    assert "gradients that were not summed over the ranks" in own
    assert "without a single exchange of gradients" in forgotten


def body_save(folder: str) -> None:
    keras, hvd = shim()
    x, y = data()
    model = dense_model(keras)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
    assert type(optimizer) is keras.optimizers.Adam
    model.compile(optimizer, loss="mse")
    model.fit(x, y, epochs=1, verbose=0)
    path = f"{folder}/{hvd.rank()}.keras"
    model.save(path)
    plain = keras.models.load_model(path)
    ours = hvd.load_model(path)
    assert plain.optimizer.get_config() == optimizer.get_config()
    ours.fit(x, y, epochs=1, verbose=0)
    with pytest.raises(ValueError, match="DistributedOptimizer already"):
        hvd.DistributedOptimizer(ours.optimizer)


def test_what_is_saved_loads_without_us(
    ranks: RankFactory, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = str(tmp_path_factory.mktemp("saved"))
    ranks(2).run(body_save, folder, timeout=PATIENCE_S)


ENDLESS_FIT = """
import sys
import numpy as np
import keras
import tensorflow as tf
import hvd_order.keras as hvd

hvd.init()

class Tell(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            print("reached", flush=True)

model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(1e-4)), loss="mse")
rows = tf.data.Dataset.from_tensors((tf.ones([4, 64]), tf.ones([4, 1]))).repeat()
try:
    model.fit(rows, steps_per_epoch=10**9, verbose=0, callbacks=[Tell()])
except tf.errors.AbortedError as error:
    print("raised", error.message, flush=True)
    sys.exit(3)
"""


def test_the_others_raise_when_a_rank_is_killed_during_fit() -> None:
    quiet = {"HVD_ORDER_TIMEOUT": "60", "TF_CPP_MIN_LOG_LEVEL": "3"}
    with start_script(3, ENDLESS_FIT, env=quiet) as script:
        for rank in range(3):
            script.wait_for_output(rank, "reached", timeout=200)
        script.kill(1)
        ended = script.wait(timeout=30)  # long before the timeout: the loss is noticed
    for rank in (0, 2):
        assert ended[rank].returncode == 3, ended[rank].stderr
        # The error begins with what has happened, and has one line.
        assert "raised rank 1 is gone: " in ended[rank].stdout
        assert len(ended[rank].stdout.splitlines()) == 2  # with "reached"


@on_ranks(2, timeout=PATIENCE_S)
def test_what_a_rank_lacks_is_named() -> None:
    """The ranks have gradients of different variables: all hear of it while they trace."""
    import tensorflow as tf

    import hvd_order.tensorflow as hvd
    from hvd_order.base.errors import ModelMismatch

    hvd.init()
    variables = [tf.Variable(tf.ones([3]), name="a"), tf.Variable(tf.ones([4]), name="b")]
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(v) for v in variables[: 2 - hvd.rank()]])
    with pytest.raises(ModelMismatch, match=r"missing on rank 1.*0: a:0"):
        hvd.DistributedGradientTape(tape).gradient(loss, variables)


@on_ranks(1, timeout=PATIENCE_S)
def test_one_process_alone() -> None:
    tf, hvd = tf_shim()
    v = tf.Variable(2.0)
    with tf.GradientTape() as tape:
        loss = v * v
    tape = hvd.DistributedGradientTape(tape)
    assert float(tape.gradient(loss, v)) == 4.0
    assert float(hvd.allreduce(v)) == 2.0
    assert hvd.allgather(tf.ones([2, 3])).shape == (2, 3)
    assert hvd.join() == 0


@on_ranks(2, timeout=PATIENCE_S)
def test_gradients_of_several_passes_are_added_up() -> None:
    import tensorflow as tf

    keras, hvd = shim()
    for average, updated in ((False, -5.0), (True, -2.5)):
        weight = keras.Variable(0.0)
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(1.0),
            backward_passes_per_step=2,
            average_aggregated_gradients=average,
        )
        for gradient in (1.0, 3.0):
            optimizer.apply_gradients([(tf.constant(gradient + hvd.rank()), weight)])
        assert float(weight) == updated


@on_ranks(2, timeout=PATIENCE_S)
def test_batch_statistics_of_all_ranks() -> None:
    """Normalizes over batches of different sizes; how far that is from one process."""
    import tensorflow as tf

    keras, hvd = shim()
    from hvd_order.tensorflow import SyncBatchNormalization

    rank = hvd.rank()
    random = np.random.default_rng(0)
    x = random.normal(size=(10, 4, 3)).astype(np.float32)
    mask = random.integers(0, 2, (10, 4)).astype(bool)
    rows = slice(0, 4) if rank == 0 else slice(4, 10)
    worst = 0.0
    for marked in (None, mask):
        results = []
        for layer, mine in (
            (keras.layers.BatchNormalization(), slice(0, 10)),
            (SyncBatchNormalization(), rows),
        ):
            layer.build((None, 4, 3))

            @tf.function
            def run(x: Any, marks: Any, layer: Any = layer) -> Any:
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    y = layer(x, training=True, mask=marks)
                    loss = tf.reduce_sum(y**3)
                return y, tape.gradient(loss, x)

            marks = None if marked is None else tf.constant(marked[mine])
            y, slope = run(tf.constant(x[mine]), marks)
            keep = slice(None) if mine == rows else rows
            results.append([y[keep], slope[keep], *layer.non_trainable_variables])
        for one, ours in zip(*results, strict=True):
            worst = max(worst, float(np.abs(np.asarray(one) - np.asarray(ours)).max()))
    assert worst < 1e-4
