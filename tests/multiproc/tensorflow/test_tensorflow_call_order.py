"""Collectives without a name in every kind of graph: each meets its own on the other ranks.

Each of the sums of a case has another value, so that one which met another is seen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from helpers.jobs import refused
from helpers.on_ranks import on_ranks
from helpers.training.keras_jobs import MARKS, PATIENCE_S, tf_shim

pytestmark = MARKS
CALLS, ROUNDS = 24, 3


# ---- graphs whose calls have to find each other -------------------------------------------------

Rounds = Callable[[], Any]


def session(tf: Any, hvd: Any) -> Rounds:
    """A graph of TensorFlow 1."""
    graph = tf.Graph()
    with graph.as_default():
        sums = [
            hvd.allreduce(tf.constant([10.0 * k + 1000 * (hvd.rank() + 1)]), op=hvd.Sum)
            for k in range(CALLS)
        ]
    running = tf.compat.v1.Session(graph=graph)
    return lambda: running.run(sums)


def wrapped(tf: Any, hvd: Any) -> Rounds:
    """``wrap_function``, which adds no control dependencies."""

    def calls(x: Any) -> Any:
        return [hvd.allreduce(x + 10.0 * k, op=hvd.Sum) for k in range(CALLS)]

    function = tf.compat.v1.wrap_function(calls, [tf.TensorSpec([1], tf.float32)])
    return lambda: function(tf.constant([1000.0 * (hvd.rank() + 1)]))


def nested(tf: Any, hvd: Any) -> Rounds:
    """Functions and conditions that use a variable: TensorFlow does not order them by itself."""
    one = tf.Variable(1.0)

    @tf.function
    def inner(x: Any, k: Any) -> Any:
        return hvd.allreduce(x * one + k, op=hvd.Sum)

    @tf.function
    def outer(x: Any) -> Any:
        def in_branch(k: float) -> Any:
            return tf.cond(one > 0, lambda: hvd.allreduce(x * one + k, op=hvd.Sum), lambda: x)

        results = []
        for k in range(0, CALLS, 3):
            results.append(hvd.allreduce(x + 10.0 * k, op=hvd.Sum))
            results.append(inner(x, tf.constant(10.0 * (k + 1))))
            results.append(in_branch(10.0 * (k + 2)))
        return results

    return lambda: outer(tf.constant([1000.0 * (hvd.rank() + 1)]))


def loop(tf: Any, hvd: Any) -> Rounds:
    """Iterations that TensorFlow may run side by side."""
    one = tf.Variable(1.0)

    @tf.function
    def function(x: Any) -> Any:
        def call(k: Any) -> Any:
            return hvd.allreduce(x * one + 10.0 * k, op=hvd.Sum)

        return tf.unstack(tf.map_fn(call, tf.range(float(CALLS)), parallel_iterations=8))

    return lambda: function(tf.constant([1000.0 * (hvd.rank() + 1)]))


def derivatives(tf: Any, hvd: Any) -> Rounds:
    """The derivative of a function inside of another one has a graph of its own, without order."""
    variables = [tf.Variable([1.0]) for _ in range(CALLS)]

    @tf.function
    def inner() -> Any:
        return [hvd.allreduce(variable, op=hvd.Sum) for variable in variables]

    @tf.function
    def outer(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.add_n([y * (x + 10.0 * k) for k, y in enumerate(inner())])
        return tape.gradient(loss, variables)

    return lambda: outer(tf.constant([1000.0 * (hvd.rank() + 1)]))


GRAPHS = {made.__name__: made for made in (session, wrapped, nested, loop, derivatives)}


@pytest.mark.parametrize("kind", GRAPHS)
@on_ranks(2, timeout=PATIENCE_S)
def test_each_call_meets_its_own(kind: str) -> None:
    run = GRAPHS[kind](*tf_shim())
    for _ in range(ROUNDS):
        assert [float(value[0]) for value in run()] == [3000.0 + 20.0 * k for k in range(CALLS)]


@pytest.mark.parametrize("swapped", [False, True])
@on_ranks(2, timeout=PATIENCE_S)
def test_calls_of_a_graph_meet_whatever_is_executed_first(swapped: bool) -> None:
    tf, hvd = tf_shim()
    function = tf.compat.v1.wrap_function(
        lambda x: [hvd.allreduce(x), hvd.allreduce(2 * x)], [tf.TensorSpec([], tf.float32)]
    )
    # Only what is asked for is executed, and each rank asks for the other one first.
    first, second = (function.prune(function.inputs[0], y) for y in function.outputs)
    calls = {"first": first, "second": second}
    order = sorted(calls, reverse=swapped and hvd.rank() == 1)
    results: dict[str, float] = {}

    def call(name: str) -> None:
        results[name] = float(calls[name](tf.constant(float(hvd.rank()))))

    threads = [threading.Thread(target=call, args=[name]) for name in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results["first"], results["second"]] == [0.5, 1.0]


# ---- what gives no order -------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("how", ["map", "named", "function", "filter"])
@on_ranks(timeout=PATIENCE_S)
def test_functions_of_tf_data_are_refused(how: str) -> None:
    tf, hvd = tf_shim()
    rows = tf.data.Dataset.range(CALLS)

    @tf.function
    def traced_before(k: Any) -> Any:
        return hvd.allreduce(k, op=hvd.Sum)

    traced_before(tf.constant(1, tf.int64))
    uses: dict[str, Callable[[], Any]] = {
        "map": lambda: rows.map(lambda k: hvd.allreduce(k, op=hvd.Sum), num_parallel_calls=4),
        "named": lambda: rows.map(lambda k: hvd.allgather(k, name="rows"), num_parallel_calls=4),
        "function": lambda: rows.map(lambda k: traced_before(k), num_parallel_calls=4),
        "filter": lambda: rows.interleave(
            lambda k: rows.filter(lambda j: hvd.allreduce(k + j) > 0)
        ),
    }
    text = refused(uses[how])
    assert ("hvd.allgather()" if how == "named" else "hvd.allreduce()") in text
    assert ("Dataset.filter()" if how == "filter" else "Dataset.map()") in text
    assert "in the training step" in text


@on_ranks(2, timeout=PATIENCE_S)
def test_other_functions_of_tf_data_are_not() -> None:
    tf, hvd = tf_shim()
    rows = tf.data.Dataset.range(4).map(lambda k: tf.cast(k, tf.float32) + hvd.rank())
    means = [float(hvd.allreduce(row)) for row in rows.batch(2).prefetch(1).unbatch()]
    assert means == [0.5, 1.5, 2.5, 3.5]


@on_ranks(2, timeout=PATIENCE_S)
def test_loops_of_a_session_are_refused() -> None:
    tf, hvd = tf_shim()
    with tf.Graph().as_default(), pytest.raises(ValueError, match="in a loop") as raised:
        tf.map_fn(lambda k: hvd.allreduce(k), tf.range(8.0), parallel_iterations=8)
    assert "hvd.allreduce() without a name" in str(raised.value)
    assert "give the call a name" in str(raised.value)


def body_second_thread(named: bool) -> str:
    """The text of the error that a call gets while one of another thread is under way."""
    tf, hvd = tf_shim()
    from hvd_order.tensorflow.ops import requests

    outcome = ""
    before = requests.reductions_started()
    first = threading.Thread(
        target=lambda: hvd.allreduce(tf.constant(0.0), name="first" if named else None)
    )
    if hvd.rank() == 0:  # its call waits for the other rank's
        first.start()
        while requests.reductions_started() == before:
            pass
        try:
            hvd.broadcast(tf.constant(0.0), 0, name="second" if named else None)
        except ValueError as error:
            outcome = str(error)
        hvd.broadcast_object(None, name="go on")
        first.join()
    else:
        if named:
            hvd.broadcast(tf.constant(0.0), 0, name="second")
        hvd.broadcast_object(None, name="go on")
        first.start()
        first.join()
    return outcome


def test_two_threads_need_names(two_ranks: Any) -> None:
    refused, _ = two_ranks.run(body_second_thread, False, timeout=PATIENCE_S)
    assert "hvd.broadcast() without a name while another thread" in refused
    assert two_ranks.run(body_second_thread, True, timeout=PATIENCE_S) == ["", ""]


@on_ranks(2, timeout=PATIENCE_S)
def test_operators_are_called_after_their_tensor() -> None:
    """As a profile shows them."""
    tf, hvd = tf_shim()
    with tf.Graph().as_default() as graph:
        rows = tf.compat.v1.placeholder(tf.float32, [2], name="rows")
        hvd.allreduce(rows)
        hvd.allreduce(rows)
        hvd.broadcast(rows, 0, name="own")
        names = [op.name for op in graph.get_operations() if op.type == "HvdOrderCollective"]
    assert names == ["hvd_allreduce_rows_0", "hvd_allreduce_rows_0_1", "hvd_broadcast_rows_0"]
