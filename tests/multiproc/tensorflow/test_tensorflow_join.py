"""Ranks with different amounts of data: those that have joined take part with zero gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.on_ranks import on_ranks
from helpers.ranks import RankFactory
from helpers.training.keras_jobs import MARKS, PATIENCE_S, apart, flat, tf_shim

pytestmark = MARKS
ROWS = 4  # of a rank's batch
MORE = 2  # steps of all ranks after the join


def rounds_of(rank: int, last: int, size: int) -> int:
    """How much data a rank has: the last one most, the others each a different amount."""
    return 2 * size + 1 if rank == last else 2 * ((rank - last) % size) - 1


def batches_of(rank: int, rounds: int) -> list[tuple[Any, Any]]:
    random = np.random.default_rng(100 + rank)
    return [
        (
            random.integers(0, 6, (ROWS, 3)).astype(np.int32),
            random.normal(size=(ROWS, 2)).astype(np.float32),
        )
        for _ in range(rounds)
    ]


def model_of(keras: Any) -> Any:
    """With gradients that are sparse, and others."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((3,), dtype="int32"),
            layers.Embedding(6, 4),
            layers.Flatten(),
            layers.Dense(8, activation="tanh"),
            layers.Dense(2),
        ]
    )


def optimizer_of(keras: Any) -> Any:
    return keras.optimizers.SGD(0.2, momentum=0.8)


def loss_of(model: Any, x: Any, y: Any) -> Any:
    import tensorflow as tf

    return tf.reduce_mean((model(x) - y) ** 2)


def trained_alone(keras: Any, last: int, size: int) -> Any:
    """One process: who has no data counts as zeros, and averages divide by all ranks."""
    import tensorflow as tf

    model, optimizer = model_of(keras), optimizer_of(keras)
    rounds = [rounds_of(rank, last, size) for rank in range(size)]
    data = [batches_of(rank, rounds[rank] + MORE) for rank in range(size)]
    steps = [
        [data[rank][turn] for rank in range(size) if turn < rounds[rank]]
        for turn in range(rounds[last])
    ] + [[data[rank][rounds[rank] + i] for rank in range(size)] for i in range(MORE)]
    for batches in steps:
        with tf.GradientTape() as tape:
            loss = tf.add_n([loss_of(model, x, y) for x, y in batches]) / size
        own = model.trainable_variables
        optimizer.apply(tape.gradient(loss, own), own)
    return flat(model)


def trainer_of(way: str, model: Any, optimizer: Any) -> Callable[[list[tuple[Any, Any]]], None]:
    """What trains on some batches."""
    import tensorflow as tf

    import hvd_order.tensorflow as hvd

    own = model.trainable_variables
    if way in ("overlapped", "fit"):
        hvd.DistributedOptimizer(optimizer)

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(model, x, y)
        if way in ("eager", "traced"):
            tape = hvd.DistributedGradientTape(tape)
        optimizer.apply(tape.gradient(loss, own), own)

    makers = {"traced": tf.function, "overlapped": hvd.overlapped_function}
    run = makers.get(way, lambda one: one)(step)

    def train(batches: list[tuple[Any, Any]]) -> None:
        for x, y in batches:
            run(tf.constant(x), tf.constant(y))

    def fit(batches: list[tuple[Any, Any]]) -> None:
        x, y = (np.concatenate(rows) for rows in zip(*batches, strict=True))
        model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)

    model.compile(optimizer, loss="mse", jit_compile=False)
    return fit if way == "fit" else train


@pytest.mark.parametrize(
    ("size", "last", "ways"),
    [
        (2, 0, ["eager", "traced"]),
        (2, 1, ["overlapped", "fit"]),
        pytest.param(3, 1, ["traced", "fit"], marks=pytest.mark.long),
    ],
)
@on_ranks(timeout=PATIENCE_S)
def test_uneven_data_trains_as_one_process(last: int, ways: list[str]) -> None:
    """By way: who joined last, how far it is from one process, and how far ranks are apart."""
    import keras

    _, hvd = tf_shim()
    rank, size = hvd.rank(), hvd.size()
    wanted = trained_alone(keras, last, size)
    batches = batches_of(rank, rounds_of(rank, last, size) + MORE)
    found = {}
    for way in ways:
        model, optimizer = model_of(keras), optimizer_of(keras)
        train = trainer_of(way, model, optimizer)
        train(batches[:-MORE])
        joined = hvd.join()
        hvd.broadcast_variables([*model.weights, *optimizer.variables], joined)
        train(batches[-MORE:])
        found[way] = (joined, *apart(flat(model), wanted))
    assert list(found) == ways
    for way, (joined, from_one_process, between_ranks) in found.items():
        assert joined == last, way
        assert from_one_process < 1e-6, way
        assert between_ranks == 0.0, way


def body_turns(last: int) -> list[list[float]]:
    """Two exchanges that take turns, as in a GAN, joined again and again; the values on all."""
    tf, hvd = tf_shim()
    a, b = tf.Variable(tf.zeros([300])), tf.Variable(tf.zeros([300]))

    def step_of(variable: Any) -> Callable[[], None]:
        def step() -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(a) + 2 * tf.reduce_sum(b)
            tape = hvd.DistributedGradientTape(tape)
            variable.assign_sub(tape.gradient(loss, variable))

        return tf.function(step)

    steps = [step_of(a), step_of(b)]
    values = []
    for _ in range(3):
        for _ in range(rounds_of(hvd.rank(), last, hvd.size())):
            for step in steps:
                step()
        root = hvd.join()
        hvd.broadcast_variables([a, b], root)
        values.append([float(tf.reduce_mean(v)) for v in (a, b)])
    return values


@pytest.mark.parametrize(("size", "last"), [(2, 0), (3, 1)])
def test_two_exchanges_by_turns_and_several_joins(ranks: RankFactory, size: int, last: int) -> None:
    turns = rounds_of(last, last, size)
    here = [sum(t < rounds_of(r, last, size) for r in range(size)) for t in range(turns)]
    once = sum(here) / size
    for values in ranks(size).run(body_turns, last, timeout=PATIENCE_S):
        assert values == [pytest.approx([-i * once, -2 * i * once], rel=1e-6) for i in (1, 2, 3)]


def body_first_step_too_late() -> str:
    """A rank has joined that has never had these gradients, so it cannot stand in for them."""
    tf, hvd = tf_shim()
    text = ""
    if hvd.rank() == 1:
        value = 1.0
        while value == 1.0:  # until word of the join has come
            value = float(hvd.allreduce(tf.constant(1.0)))
        variable = tf.Variable(tf.ones([3]))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable)
        with pytest.raises(ValueError, match="while another rank waits in join") as caught:
            hvd.DistributedGradientTape(tape).gradient(loss, variable)
        text = str(caught.value)
    else:
        hvd.allreduce(tf.constant(1.0))
    hvd.join()
    return text


def test_a_first_step_after_a_join_is_an_error_at_once(ranks: RankFactory) -> None:
    _, text = ranks(2).run(body_first_step_too_late, timeout=PATIENCE_S)
    assert "gradients are to be exchanged for the first time" in text
