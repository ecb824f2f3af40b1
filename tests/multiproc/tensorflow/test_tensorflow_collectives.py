"""Collectives of hvd_order.tensorflow: eager and traced, values, gradients, mistakes.

The ranks are those of the pool, where hvd_order.torch is at work as well: one job for both.
"""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from helpers.on_ranks import on_ranks
from helpers.training.keras_jobs import MARKS, PATIENCE_S, tf_shim

pytestmark = MARKS


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
@on_ranks(2, timeout=PATIENCE_S)
def test_values(traced: bool) -> None:
    tf, hvd = tf_shim()
    rank, size = hvd.rank(), hvd.size()

    def everything(x: Any, rows: Any) -> dict[str, Any]:
        splits = [1] * (size - 1) + [2]
        exchanged, received = hvd.alltoall(tf.range(float(size + 1)) + 10.0 * rank, splits)
        slices = tf.IndexedSlices(rows, tf.fill([rank + 1], rank), dense_shape=[size, 2])
        summed = hvd.allreduce(slices, op=hvd.Sum)
        return {
            "average": hvd.allreduce(x),
            "scaled": hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5),
            "max": hvd.allreduce(tf.cast(x, tf.int64), op=hvd.Max),
            "bfloat16": tf.cast(hvd.allreduce(tf.cast(x, tf.bfloat16)), tf.float32),
            "any": hvd.allreduce(x > 2.5, op=hvd.Max),
            "compressed": hvd.allreduce(x, compression=hvd.Compression.fp16, name="compressed"),
            "scalar": hvd.allreduce(x[0]),
            "empty": hvd.allreduce(x[:0]),
            "group": hvd.grouped_allreduce([x, tf.cast(x, tf.float64)], op=hvd.Sum),
            "rows": hvd.allgather(rows),
            "two_rows": hvd.grouped_allgather([rows, x]),
            "root": hvd.broadcast(x, size - 1),
            "unsigned": hvd.broadcast(tf.constant([rank], tf.uint32), 0),
            "exchanged": exchanged,
            "received": received,
            "scattered": hvd.reducescatter(x, op=hvd.Sum),
            "sparse_values": summed.values,
            "sparse_indices": summed.indices,
        }

    function = tf.function(everything) if traced else everything
    x = tf.range(1.0, 5.0) * (rank + 1)
    rows = tf.fill([rank + 1, 2], float(rank))
    results = [function(x, rows) for _ in range(2)]  # the second time, nothing is traced
    tf.nest.map_structure(np.testing.assert_array_equal, *results)
    got = {name: tf.nest.map_structure(np.asarray, value) for name, value in results[1].items()}
    x = np.arange(1.0, 5.0)
    rows = np.concatenate([np.full([r + 1, 2], r) for r in range(size)])
    expected = {
        "average": 1.5 * x,
        "scaled": 3 * x,
        "max": 2 * x,
        "bfloat16": 1.5 * x,
        "any": 2 * x > 2.5,
        "compressed": 1.5 * x,
        "scalar": 1.5,
        "empty": [],
        "group": [3 * x, 3 * x],
        "rows": rows,
        "two_rows": [rows, np.concatenate([x, 2 * x])],
        "root": 2 * x,
        "unsigned": [0],
        "exchanged": [0, 10] if rank == 0 else [1, 2, 11, 12],
        "received": [rank + 1] * size,
        "scattered": 3 * (x[:2] if rank == 0 else x[2:]),
        "sparse_values": rows,
        "sparse_indices": [0, 1, 1],
    }
    assert set(got) == set(expected)
    for name, value in expected.items():
        pairs = zip(got[name], value, strict=True) if isinstance(got[name], list) else [
            (got[name], value)
        ]  # fmt: skip
        for ours, right in pairs:
            np.testing.assert_allclose(ours, right, err_msg=name)


@on_ranks(2, timeout=PATIENCE_S)
def test_gradients_are_horovods() -> None:
    tf, hvd = tf_shim()
    rank, size = hvd.rank(), hvd.size()

    @tf.function
    def gradients(x: Any, rows: Any, weights: Any) -> dict[str, Any]:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch([x, rows])
            losses = {
                "allreduce": (x, tf.reduce_sum(weights * hvd.allreduce(x, op=hvd.Sum))),
                "broadcast": (x, tf.reduce_sum(weights * hvd.broadcast(x, 1))),
                "allgather": (rows, tf.reduce_sum(hvd.allgather(rows) ** 2 * (rank + 1))),
                "own_rows": (rows, tf.reduce_sum(hvd.allgather(rows) * [[1.0], [2.0], [3.0]])),
                "alltoall": (x, tf.reduce_sum(hvd.alltoall(x) * (rank + 1))),
                "reducescatter": (x, tf.reduce_sum(hvd.reducescatter(x, op=hvd.Sum) * (rank + 1))),
            }
        return {name: tape.gradient(loss, source) for name, (source, loss) in losses.items()}

    x = tf.ones([2 * size])
    rows = tf.fill([rank + 1, 1], 3.0)
    result = gradients(x, rows, tf.fill([2 * size], float(rank + 1)))
    wanted = {
        "allreduce": [3.0] * 4,
        "broadcast": [1.5 if rank == 1 else 0.0] * 4,
        "allgather": [[9.0]] * (rank + 1),  # average of 6 and 12
        "own_rows": [[[1.0]], [[2.0], [3.0]]][rank],
        "alltoall": [1.0, 1.0, 2.0, 2.0],
        "reducescatter": [2.0, 2.0, 4.0, 4.0],
    }
    for name, value in wanted.items():
        np.testing.assert_allclose(result[name], value, err_msg=name)


@on_ranks(2, timeout=PATIENCE_S)
def test_mistakes_raise_and_leave_the_ranks_in_step() -> None:
    tf, hvd = tf_shim()
    rank = hvd.rank()
    from hvd_order.base import errors

    with pytest.raises(errors.ModelMismatch, match=r"\[1\] .*\[2\]") as uneven:
        hvd.allreduce(tf.ones([rank + 1]), name="uneven")
    with pytest.raises(tf.errors.FailedPreconditionError, match="ModelMismatch"):
        tf.function(lambda: hvd.allreduce(tf.ones([rank + 1]), name="uneven"))()
    with pytest.raises(ValueError, match="root_rank is 7") as root:
        hvd.broadcast(tf.ones([1]), 7)
    with pytest.raises(ValueError, match="at least one dimension") as scalar:
        hvd.reducescatter(tf.constant(1.0))
    # As in Horovod, whose operators end with errors of TensorFlow.
    for error, kind in (
        (uneven.value, tf.errors.FailedPreconditionError),
        (root.value, tf.errors.InvalidArgumentError),
        (scalar.value, tf.errors.InvalidArgumentError),
    ):
        assert isinstance(error, kind)
        assert isinstance(error, errors.HvdOrderError)
        assert error.message == str(error)
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again)) == (type(error), str(error))
    with pytest.raises(ValueError, match="not registered"):
        hvd.allreduce(tf.ones([1]), process_set=hvd.ProcessSet([0]))
    with pytest.raises(NotImplementedError, match="IndexedSlices"):
        hvd.allreduce(tf.IndexedSlices(tf.ones([1, 1]), [0], [2, 1]), op=hvd.Min)
    assert float(hvd.allreduce(tf.constant(1.0))) == 1.0  # and the ranks are still in step


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("everything", [False, True])
@on_ranks(timeout=PATIENCE_S)
def test_variables_of_a_session(everything: bool) -> None:
    tf, hvd = tf_shim()
    with tf.Graph().as_default():
        variables = [
            tf.compat.v1.get_variable(f"v{i}", initializer=float(10 * hvd.rank() + i))
            for i in range(8)
        ]
        if everything:
            brought = hvd.broadcast_global_variables(hvd.size() - 1)
        else:
            brought = hvd.broadcast_variables(variables, hvd.size() - 1)
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            assert session.run(brought) is None
            found = [float(value) for value in session.run(variables)]
    assert found == [10.0 * (hvd.size() - 1) + i for i in range(8)]


@on_ranks(2, timeout=PATIENCE_S)
def test_names_of_horovod() -> None:
    tf, hvd = tf_shim()
    import hvd_order.keras

    for module in (hvd, hvd_order.keras):
        assert module.gpu_available("tensorflow") == bool(tf.config.list_physical_devices("GPU"))
        with pytest.raises(RuntimeError, match="does not support eager execution"):
            module.broadcast_global_variables(0)
    assert hvd.mpi_ops.rank() == hvd.rank()
    assert hvd.mpi_ops.allgather is hvd.allgather
    assert hvd.mpi_ops.Average is hvd.Average


@on_ranks(2, timeout=PATIENCE_S)
def test_state_process_sets_and_join() -> None:
    tf, hvd = tf_shim()
    rank = hvd.rank()
    variables = [tf.Variable(tf.fill([3], float(rank))), tf.Variable(rank, dtype=tf.int64)]
    hvd.broadcast_variables(variables, root_rank=1)
    assert [int(tf.reduce_max(v)) for v in variables] == [1, 1]
    variables[0].assign([float(rank)] * 3)
    tf.function(lambda: hvd.broadcast_variables(variables, root_rank=0))()
    assert float(variables[0][0]) == 0.0
    assert hvd.broadcast_object({"epoch": rank}, 1) == {"epoch": 1}
    assert hvd.allgather_object(rank) == [0, 1]
    alone = hvd.add_process_set([1])
    assert alone.size() == 1

    @tf.function
    def numbers() -> list[Any]:
        included = hvd.process_set_included_op(alone.process_set_id)
        return [hvd.rank_op(), hvd.size_op(), hvd.size_op(alone.process_set_id), included]

    assert [int(number) for number in numbers()] == [rank, 2, 1, rank]
    assert int(hvd.local_rank_op()) == hvd.local_rank()
    assert int(hvd.local_size_op()) == hvd.local_size()
    if alone.included():
        assert alone.rank() == 0
        assert float(hvd.allreduce(tf.constant(5.0), op=hvd.Sum, process_set=alone)) == 5.0
    assert hvd.remove_process_set(alone)
    joined = hvd.join() if rank == 0 else None
    if rank == 1:
        assert float(hvd.allreduce(tf.constant(4.0), name="after the other has joined")) == 2.0
        joined = hvd.join()
    assert joined == 1


@on_ranks(2, timeout=PATIENCE_S)
def test_operators_after_a_shutdown() -> None:
    """Shutdown ends what graphs ask for; after init() they work, but for traced gradients."""
    tf, hvd = tf_shim()
    variable = tf.Variable(tf.ones([4]))

    @tf.function
    def average(x: Any) -> Any:
        return hvd.allreduce(x)

    @tf.function
    def gradient(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable) * x
        return hvd.DistributedGradientTape(tape).gradient(loss, variable)

    def outcome(call: Any) -> str:
        try:
            return str(float(tf.reduce_mean(call())))
        except tf.errors.FailedPreconditionError as error:
            return "not initialized" if "NotInitialized" in str(error) else str(error)

    x = tf.constant(float(hvd.rank()))
    seen = [outcome(lambda: average(x)), outcome(lambda: gradient(x))]
    hvd.shutdown()
    seen += [outcome(lambda: average(x)), outcome(lambda: gradient(x))]
    hvd.init()
    seen += [outcome(lambda: average(x)), outcome(lambda: gradient(x))]
    gone = "not initialized"
    assert seen == ["0.5", "0.5", gone, gone, "0.5", gone]
