"""One process of a job with ParameterServerStrategy: the coordinator, a worker or a server.

Obeys the commands of its standard input (runner/commands.py). Layers compute by sleeping, as
those of benchmarks/runner/workloads/tensorflow_model.py. The coordinator traces them, but Python
runs in the workers: the operator knows a function of Python by a name that its process has given
it, which is the same for the first function of every process.
"""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.runner.commands import serve

_STEP_SPREAD = 0.12  # sigma of a step's factor on the time of all its layers, log-normal
_FACTORS = 20  # quantiles of it, of which each worker takes all, in random order, then again
_LAYER_SPREAD = 0.08  # the same of each layer alone
_FUNCTION = "pyfunc_0"  # TensorFlow's name for the first function of a process
_LEARNING_RATE = 1e-6


class Task:
    """A worker or server."""

    def __init__(self, job: dict[str, Any]) -> None:
        """Starts TensorFlow's server."""
        self._seconds: list[float] = []
        self._random = random.Random(job["index"])
        self._factor = 1.0
        self._factors: list[float] = []
        self._begins: list[float] = []
        if job["task"] == "worker":
            # One layer sleeps at a time; the others are for what is behind it.
            tf.config.threading.set_inter_op_parallelism_threads(4)
        tf.config.threading.set_intra_op_parallelism_threads(1)
        self._kept = tf.Graph()
        with self._kept.as_default():
            called = tf.numpy_function(self._sleep, [0, 0.0], tf.float32)
        assert called.op.get_attr("token").decode() == _FUNCTION
        self._server = tf.distribute.Server(
            tf.train.ClusterSpec(job["cluster"]), job_name=job["task"], task_index=job["index"],
            protocol="grpc",
        )  # fmt: skip

    def _sleep(self, layer: Any, x: Any, *_: Any) -> Any:
        if layer == 0:
            self._begins.append(time.monotonic())
            self._factor = self._next_factor()
        own = self._random.lognormvariate(0, _LAYER_SPREAD)
        time.sleep(self._seconds[int(layer)] * self._factor * own)
        return np.float32(x)

    def _next_factor(self) -> float:
        """Of all quantiles, so that the mean of twenty steps is known and their order is not."""
        if not self._factors:
            quantile = statistics.NormalDist(0, _STEP_SPREAD).inv_cdf
            self._factors = [math.exp(quantile((i + 0.5) / _FACTORS)) for i in range(_FACTORS)]
            self._random.shuffle(self._factors)
        return self._factors.pop()

    def layers(self, seconds: list[float]) -> None:
        """Sets the mean time of each layer, forward and then backward."""
        self._seconds = seconds

    def begins(self) -> list[float]:
        """When steps began since the last call; all processes are on one machine's clock."""
        found, self._begins = self._begins, []
        return found

    def trace(self, folder: str) -> None:
        """Starts TensorFlow's profiler."""
        tf.profiler.experimental.start(folder)

    def stop(self) -> None:
        """Ends it."""
        tf.profiler.experimental.stop()


class Coordinator:
    """Schedules steps."""

    def __init__(self, job: dict[str, Any]) -> None:
        """Makes the variables on the servers; ``job["layers"]``: elements of each one's tensors."""
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(job["cluster"]), rpc_layer="grpc", task_type="chief", task_id=0
        )
        self._strategy = tf.distribute.ParameterServerStrategy(resolver)
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(self._strategy)
        self._layers: list[list[Any]] = []
        with self._strategy.scope():
            for i, tensors in enumerate(job["layers"]):
                self._layers.append([
                    tf.Variable(lambda n=n: tf.zeros((n,)), name=f"v{i}.{k}")
                    for k, n in enumerate(tensors)
                ])  # fmt: skip
            self._tiny = tf.Variable(lambda: tf.zeros((1,)), name="tiny")
        self._variables = [variable for layer in self._layers for variable in layer]
        self._step = tf.function(self._trained, autograph=False)
        self._bare = self._bare_functions()

    def _trained(self) -> None:
        """A step: all layers forward and backward, and updates."""
        count = len(self._layers)
        values = [[tf.convert_to_tensor(v) for v in layer] for layer in self._layers]
        x = tf.random.uniform(())  # the data; what depends on none is no part of a step
        outputs = []
        for i, layer in enumerate(values):
            x = _call(i, x + tf.add_n([value[0] for value in layer]))
            outputs.append(x)
        for i in reversed(range(count)):
            x = _call(2 * count - 1 - i, x, outputs[i])
            _push(self._layers[i], x)

    def _bare_functions(self) -> dict[str, Any]:
        """Fetches and pushes without a step, of one tensor, of small and of large ones."""
        by_size = sorted(self._variables, key=lambda v: v.shape.num_elements())
        total, large = sum(v.shape.num_elements() for v in by_size), []
        while sum(v.shape.num_elements() for v in large) < 0.8 * total:
            large.append(by_size[-1 - len(large)])
        sets = {"tiny": [self._tiny], "small": by_size[: len(by_size) // 2], "large": large}
        self._sets = sets
        found = {}
        for name, variables in sets.items():
            found[f"fetch {name}"] = _fetching(variables)
            found[f"push {name}"] = _pushing(variables, self._tiny)
        return found

    def run(self, steps: int) -> None:
        """Runs steps, so many of all workers together, and waits for all of them."""
        for _ in range(steps):
            self._coordinator.schedule(self._step)
        self._coordinator.join()

    def bare(self, times: int) -> None:
        """Runs each fetch and push so many times."""
        for _ in range(times):
            for function in self._bare.values():
                self._coordinator.schedule(function)
        self._coordinator.join()

    def bare_times(self, worker: str) -> dict[str, dict[str, Any]]:
        """Bytes, tensors and seconds of each fetch and push, from the worker's trace."""
        from hvd_order.tensorflow.strategy.trace import find_file, runs_of

        found = {}
        for name, function in self._bare.items():
            with self._strategy.scope():
                function_name = function.get_concrete_function().name
            runs = runs_of(function_name.decode(), find_file(Path(worker))).values()
            variables = self._sets[name.split()[1]]
            found[name] = {
                "tensors": len(variables),
                "bytes": 4 * sum(v.shape.num_elements() for v in variables),
                "seconds": [
                    1e-12 * ((run.came_ps if "fetch" in name else run.end_ps) - run.asked_ps)
                    for run in runs
                ],
            }
        return found

    def profile(self, worker: str, servers: list[str], model: str, file: str) -> None:
        """Writes the step's profile."""
        from hvd_order.tensorflow.strategy import profile_of_strategy

        profile_of_strategy(
            self._strategy, self._step, self._variables, worker=worker, servers=servers,
            model=model,
        ).write(file)  # fmt: skip


def _call(layer: int, x: Any, *after: Any) -> Any:
    # Not stateful: TensorFlow would let no two of these run at once, in any model. And not
    # tf.numpy_function, which would bring all layers to the coordinator.
    inputs = [layer, x, *after]
    (y,) = tf.raw_ops.PyFuncStateless(input=inputs, token=_FUNCTION, Tout=[tf.float32])
    y.set_shape(())
    return y


def _push(variables: list[Any], x: Any) -> None:
    """Sends a gradient for each variable; all differ, or TensorFlow would send one for all."""
    for i, variable in enumerate(variables):
        gradient = tf.fill(variable.shape, x + float(i))
        tf.raw_ops.ResourceApplyGradientDescent(
            var=variable.handle, alpha=_LEARNING_RATE, delta=gradient
        )


def _fetching(variables: list[Any]) -> Any:
    def fetch() -> Any:
        return tf.add_n([tf.convert_to_tensor(v)[0] for v in variables])

    return tf.function(fetch, autograph=False)


def _pushing(variables: list[Any], tiny: Any) -> Any:
    def push() -> None:
        _push(variables, tf.convert_to_tensor(tiny)[0])

    return tf.function(push, autograph=False)


def _role() -> Coordinator | Task:
    job: dict[str, Any] = json.loads(sys.argv[1])
    return Coordinator(job) if job["task"] == "chief" else Task(job)


if __name__ == "__main__":
    serve(_role)
    os._exit(0)  # TensorFlow's servers have no end of their own
