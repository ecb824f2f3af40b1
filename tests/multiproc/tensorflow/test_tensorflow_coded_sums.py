"""Gradients in codes: ``compression=hvd.Compression.int8`` with TensorFlow and Keras."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.jobs import SMALL, new_job, on_hosts
from helpers.on_ranks import on_ranks
from helpers.oracles.coded_sums import Ranks
from helpers.ranks import RankFactory
from helpers.training.keras_jobs import MARKS, PATIENCE_S, apart, flat, shim, tf_shim

from hvd_order._native import _torch as native
from hvd_order.base.errors import InvalidUsage, ModelMismatch

pytestmark = MARKS
ROWS, COLUMNS = 40, 70


def gradient(rank: int, step: int, shape: tuple[int, ...] = (ROWS, COLUMNS)) -> Any:
    random = np.random.default_rng(1000 * step + rank)
    return (random.normal(size=shape) * 10.0 ** (step % 5 - 2)).astype(np.float32)


def summed(variables: list[Any], gradients: list[Any], **how: Any) -> list[Any]:
    """The sums of gradients that are these numbers."""
    tf, hvd = tf_shim()
    how.setdefault("compression", hvd.Compression.int8)
    how.setdefault("op", hvd.Sum)
    with tf.GradientTape() as tape:
        products = [tf.reduce_sum(v * g) for v, g in zip(variables, gradients, strict=True)]
    tape = hvd.DistributedGradientTape(tape, **how)
    return [each.numpy() for each in tape.gradient(products, variables)]


def body_sums(steps: int, hosts: list[int]) -> list[Any]:
    tf, hvd = tf_shim()
    with on_hosts(hosts):
        weight = tf.Variable(tf.zeros([ROWS, COLUMNS]))
        return [summed([weight], [gradient(hvd.rank(), step)])[0] for step in range(steps)]


@pytest.mark.parametrize(("size", "hosts"), [(2, []), (3, []), (3, [0, 0, 1])])
def test_sums_are_those_of_one_process_with_the_same_codes(
    ranks: RankFactory, size: int, hosts: list[int]
) -> None:
    steps, elements = 12, ROWS * COLUMNS
    place = (elements + 1 + 15) // 16 * 16  # 64 bytes, the last element in front of their end
    shards = [native.shard_of(place, rank, size) for rank in range(size)]
    parts = [slice(begin, begin + length) for begin, length in shards]
    oracle = Ranks(parts, place - 1, hosts or None)
    of_ranks = ranks(size).run(body_sums, steps, hosts, timeout=PATIENCE_S)
    for step in range(steps):
        padded = [torch.zeros(place - 1) for _ in range(size)]
        for rank in range(size):
            padded[rank][:elements] = torch.from_numpy(gradient(rank, step).ravel())
        want = oracle.total(padded)[:elements].view(ROWS, COLUMNS).numpy()
        for sums in of_ranks:
            assert np.array_equal(sums[step], want), step


@on_ranks(3, timeout=PATIENCE_S)
def test_what_codes_lack_is_sent_later() -> None:
    """The sum of 200 sums lacks less than a rounding or two of one of them."""
    tf, hvd = tf_shim()
    weight = tf.Variable(tf.zeros([30, 40]))
    each = [gradient(rank, 2, (30, 40)).astype(np.float64) for rank in range(hvd.size())]
    for one in each:
        one[::7, 0] = 1000.0  # each of these takes the bits of its block
    want = np.sum(each, 0)
    mine = each[hvd.rank()].astype(np.float32)
    for kind, one_rounding in (("int8", 4 * 3000 / 127), ("bf16_ef", 4 * 3000 / 256)):
        compression = getattr(hvd.Compression, kind)
        total = np.zeros_like(want)
        for _ in range(200):
            total += summed([weight], [mine], compression=compression)[0]
        assert np.abs(total - 200 * want).max() < one_rounding, kind
        # Without feedback small values would be lost in every step.
        one = summed([tf.Variable(weight)], [mine], compression=compression)[0]
        assert np.abs(one - want).max() > 0.01, kind


@on_ranks(2, timeout=PATIENCE_S)
def test_what_is_not_finite_arrives_as_such() -> None:
    tf, hvd = tf_shim()
    weight = tf.Variable(tf.zeros([20, 30]))
    mine = np.ones((20, 30), np.float32)
    if hvd.rank() == 1:
        mine[3, 3:6] = [np.inf, -np.inf, np.nan]
    (first,) = summed([weight], [mine])
    assert np.array_equal(first[3, 3:5], [np.inf, -np.inf])
    assert np.isnan(first[3, 5])
    finite = np.isfinite(first)
    assert finite.sum() == first.size - 3
    assert np.allclose(first[finite], 2.0, atol=0.05)
    (second,) = summed([weight], [np.ones((20, 30), np.float32)])
    assert np.allclose(second, 2.0, atol=0.05)  # no residual is infinite


@on_ranks(2, timeout=PATIENCE_S)
def test_kept_and_small_variables_are_exact() -> None:
    tf, hvd = tf_shim()
    shapes = {"router/kernel": (8, 9), "bias": (17,), "body/kernel": (8, 9), "wide": (4, 4)}
    dtypes = {"wide": tf.float64}
    variables = [
        tf.Variable(tf.zeros(shape, dtypes.get(name, tf.float32)), name=name)
        for name, shape in shapes.items()
    ]
    of_ranks = [
        [
            gradient(r, 2, s).astype(v.dtype.as_numpy_dtype)
            for s, v in zip(shapes.values(), variables, strict=True)
        ]
        for r in range(2)
    ]
    keep = hvd.Compression.int8(keep=["router"])
    sums = summed(variables, of_ranks[hvd.rank()], compression=keep)
    exact = [np.array_equal(s, a + b) for s, a, b in zip(sums, *of_ranks, strict=True)]
    assert exact == [True, True, False, True]


def model_of(keras: Any) -> Any:
    keras.utils.set_random_seed(1)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((90,)),
            layers.Dense(120, activation="tanh"),
            layers.Dense(70, activation="tanh"),
            layers.Dense(3),
        ]
    )


def fitted(kind: str, settings: dict[str, Any], **how: Any) -> tuple[Any, list[float], set[int]]:
    """Weights, losses, and how many updates were deferred after batches."""
    from hvd_order.tensorflow.gradients import deferred_updates

    keras, hvd = shim()
    deferred = set()
    count = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: deferred.add(len(deferred_updates.pending))
    )
    numbers = np.random.default_rng(hvd.rank())
    x = numbers.normal(size=(64, 90)).astype(np.float32)
    y = np.tanh(x[:, :3])
    model = model_of(keras)
    inner = keras.optimizers.SGD(0.05, momentum=0.9, clipnorm=how.pop("clipnorm", None))
    if how.pop("scaled", False):
        inner = keras.optimizers.LossScaleOptimizer(inner, dynamic_growth_steps=4)
    optimizer = hvd.DistributedOptimizer(inner, compression=getattr(hvd.Compression, kind), **how)
    model.compile(optimizer, loss="mse", jit_compile=False, **settings)
    history = model.fit(x, y, batch_size=8, epochs=4, shuffle=False, verbose=0, callbacks=[count])
    return flat(model), history.history["loss"], deferred


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "eager": ({"run_eagerly": True}, {}),
    "several steps": ({"steps_per_execution": 4}, {}),
    "clipped": ({}, {"clipnorm": 0.1}),
    "accumulated": ({}, {"backward_passes_per_step": 2}),
    "loss scaling": ({}, {"scaled": True}),
    "predivided": ({}, {"gradient_predivide_factor": 2.0}),
}


@pytest.mark.parametrize("way", WAYS)
@on_ranks(3, timeout=PATIENCE_S)
def test_fit_trains_alike_on_all_ranks_and_like_without(way: str) -> None:
    settings, how = WAYS[way]
    keras, _ = shim()
    start = flat(model_of(keras))
    exact, _, as_before = fitted("none", settings, **how)
    assert as_before == ({0} if way in ("eager", "accumulated") else {1})
    for kind in ("int8", "bf16_ef") if way == "plain" else ("int8",):
        ours, losses, deferred = fitted(kind, settings, **how)
        assert deferred == as_before
        assert apart(ours, ours)[1] == 0.0
        assert losses[-1] < losses[0]
        assert 0 < np.linalg.norm(ours - exact) < 0.02 * np.linalg.norm(exact - start), kind


@pytest.mark.parametrize(
    "settings", [SMALL, {"HVD_ORDER_AGREEMENT": "planned"}], ids=["small slices", "planned"]
)
@on_ranks(3, timeout=PATIENCE_S)
def test_fit_trains_alike_with_other_settings(settings: dict[str, str]) -> None:
    keras, _ = shim()
    start = flat(model_of(keras))
    exact, _, _ = fitted("none", {})
    with new_job(settings):
        ours, _, _ = fitted("int8", {})
        assert apart(ours, ours)[1] == 0.0
    assert 0 < np.linalg.norm(ours - exact) < 0.02 * np.linalg.norm(exact - start)


@on_ranks(2, timeout=PATIENCE_S)
def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    import tensorflow as tf

    keras, hvd = shim()
    weight = keras.Variable(tf.ones([30, 30]))
    scaler = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=4.0)
    scaler.build([weight])
    hvd.DistributedOptimizer(scaler, compression=hvd.Compression.int8)
    seen = []
    for step in range(4):
        overflows = step == 2 and hvd.rank() == 1
        slope = tf.fill([30, 30], np.float32(np.inf if overflows else 0.5))
        scaler.apply([slope * scaler.dynamic_scale], [weight])
        seen.append(weight.numpy())
    assert np.array_equal(seen[2], seen[1])
    assert float(scaler.dynamic_scale) == 2.0
    assert np.allclose(seen[3], 1 - 3 * 0.5, atol=0.01)
    assert apart(seen[3], seen[3])[1] == 0.0


@on_ranks(3, timeout=PATIENCE_S)
def test_a_rank_that_has_joined_sends_what_it_owes() -> None:
    """Ranks 0 and 2 train on, traced, while rank 1 has joined: equal sums, and nothing is lost."""
    tf, hvd = tf_shim()
    weight = tf.Variable(tf.zeros([20, 20]))
    each = [gradient(rank, 2, (20, 20)) for rank in range(3)]

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * each[hvd.rank()])
        tape = hvd.DistributedGradientTape(tape, op=hvd.Sum, compression=hvd.Compression.int8)
        weight.assign_add(tape.gradient(loss, weight))

    for _ in range(3 if hvd.rank() == 1 else 40):
        step()
    hvd.join()
    everyone = hvd.allgather(weight[None])
    want = 40 * (each[0].astype(np.float64) + each[2]) + 3 * each[1].astype(np.float64)
    assert np.array_equal(everyone[0], everyone[2])
    assert np.abs(everyone[0].numpy() - want).max() < 0.2


@on_ranks(3, timeout=PATIENCE_S)
def test_a_process_set_sums_codes_by_itself() -> None:
    tf, hvd = tf_shim()
    members = hvd.add_process_set([0, 2])
    codes = np.full((20, 20), 127 / 64, np.float32)  # 8 bits hold them
    (total,) = summed([tf.Variable(tf.zeros([20, 20]))], [codes], process_set=members)
    assert np.array_equal(total, codes if hvd.rank() == 1 else 2 * codes)
    hvd.remove_process_set(members)


@on_ranks(2, timeout=PATIENCE_S)
def test_what_cannot_be_encoded_is_refused_with_the_cure() -> None:
    tf, hvd = tf_shim()
    keras, _ = shim()
    from hvd_order import keras as for_keras

    int8, auto = hvd.Compression.int8, hvd.Compression.auto
    with pytest.raises(InvalidUsage, match=r"Compression\.bf16"):
        hvd.allreduce(tf.ones(4), compression=int8)
    with pytest.raises(InvalidUsage, match=r"Adasum.*Compression\.bf16"):
        hvd.DistributedGradientTape(tf.GradientTape(), compression=int8, op=hvd.Adasum)
    with pytest.raises(InvalidUsage, match=r"only hvd_order\.torch makes; use Compression\.int8"):
        for_keras.DistributedOptimizer(keras.optimizers.SGD(), compression=auto)
    kind = int8 if hvd.rank() == 0 else hvd.Compression.none
    with pytest.raises(ModelMismatch, match="float32 in int8"):
        summed([tf.Variable(tf.zeros([4, 4]))], [np.ones((4, 4))], compression=kind)


@on_ranks(2, timeout=PATIENCE_S)
def test_a_setting_that_forbids_halves_is_named() -> None:
    import tensorflow as tf

    with new_job({"HVD_ORDER_SPLIT": "never"}), pytest.raises(InvalidUsage) as refused:
        summed([tf.Variable(tf.zeros([4, 4]))], [np.ones((4, 4))])
    assert str(refused.value) == (
        "sums of encoded gradients are not possible: HVD_ORDER_SPLIT=never. Use Compression.bf16 "
        "or none"
    )
