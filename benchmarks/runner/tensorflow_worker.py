"""One rank of TensorFlow, which obeys the commands of its standard input (commands.py).

A process can be part of one distributed system only, so each has ranks of its own. All train by
``model.fit``, but for `MultiWorkerMirroredStrategy`, with which Keras 3.15's ``fit`` ends with an
error: it has a loop as in TensorFlow's guide to custom training.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from benchmarks.runner.commands import cpu_s, link_samples, sent_bytes, serve
from benchmarks.runner.workloads.profiles import PROFILES
from benchmarks.runner.workloads.tensorflow_model import EmulatedModel, sum_of_outputs

_LEARNING_RATE = 1e-2


class _Stamps(keras.callbacks.Callback):  # type: ignore[misc]
    """When each step began, and when the last one ended."""

    def __init__(self, recorder: Any, warm_up: int) -> None:
        super().__init__()
        self.starts: list[float] = []
        self.end = 0.0
        self.began_cpu_s = 0.0
        self._recorder = recorder
        self._warm_up = warm_up

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Counts from the end of the warm-up."""
        if batch == self._warm_up:
            self.began_cpu_s = cpu_s()
        self._recorder.events.clear()
        self.starts.append(time.monotonic())

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """The last one's is kept."""
        self.end = time.monotonic()


@dataclass
class _Job:
    model: EmulatedModel
    note: str


class Worker:
    """The commands; each method's result is the answer."""

    def __init__(self, peer: str) -> None:
        """``peer``: whose ranks these are; see ``build``."""
        tf.config.threading.set_inter_op_parallelism_threads(8)  # sleeping layers hold one each
        tf.config.threading.set_intra_op_parallelism_threads(1)
        self._rank = int(os.environ.get("RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
        self._jobs: dict[str, _Job] = {}
        self._strategy: Any = None
        self._mirrored: Callable[[], Any] | None = None
        self._hvd: Any = None
        if peer == "tensorflow_mirrored":
            self._strategy = tf.distribute.MultiWorkerMirroredStrategy()
        elif peer == "tensorflow_horovod":
            import horovod.tensorflow as hvd

            hvd.init()
            self._hvd = hvd

    def build(
        self, job: str, system: str, model: str, compute_s: list[float], options: dict[str, Any]
    ) -> list[int]:
        """Makes a system with a model of its own, named ``job``.

        Args:
            system: "local", "hvd_order", "horovod" or "mirrored".
            compute_s: of a step, by rank.

        Returns:
            Sizes of the layers, in bytes.
        """
        profile = PROFILES[model]().scaled_to(compute_s[self._rank])
        if self._strategy is not None:
            with self._strategy.scope():
                made = self._compiled(profile, system, options)
        else:
            made = self._compiled(profile, system, options)
        self._jobs[job] = _Job(made, "")
        return [layer.size_bytes for layer in profile.layers]

    def _compiled(self, profile: Any, system: str, options: dict[str, Any]) -> EmulatedModel:
        model = EmulatedModel(profile, self._rank)
        optimizer = keras.optimizers.SGD(_LEARNING_RATE)
        if system == "hvd_order":
            os.environ.update(options.get("env") or {})
            import hvd_order.keras as hvd

            hvd.init()
            self._hvd = hvd
            optimizer = hvd.DistributedOptimizer(optimizer)
        elif system == "horovod":
            model.wrap_tape = self._hvd.DistributedGradientTape
        model.compile(optimizer, loss=sum_of_outputs)
        return model

    def drop(self, job: str) -> None:
        """Frees a system and its model."""
        del self._jobs[job]
        self._mirrored = None
        gc.collect()

    def settle(self, job: str, at_least: int) -> str:
        """Runs first steps; returns what a reader of the results has to know."""
        self._fit(job, at_least, 0)
        for variable in self._jobs[job].model.trainable_variables:
            variable.assign(tf.zeros_like(variable))
        return self._jobs[job].note

    def _fit(self, job: str, steps: int, warm_up: int) -> _Stamps:
        model = self._jobs[job].model
        stamps = _Stamps(model.recorder, warm_up)
        row = tf.ones([1 if self._strategy is None else self._strategy.num_replicas_in_sync, 1])
        options = tf.data.Options()  # a strategy deals out the rows of each batch
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        rows = tf.data.Dataset.from_tensors((row, row)).repeat().with_options(options)
        if self._strategy is None:
            model.fit(rows, steps_per_epoch=steps, epochs=1, verbose=0, callbacks=[stamps])
            return stamps
        if self._mirrored is None:
            self._mirrored = self._loop(model, rows)
        for batch in range(steps):
            stamps.on_train_batch_begin(batch)
            self._mirrored()
            stamps.on_train_batch_end(batch)
        return stamps

    def _loop(self, model: EmulatedModel, rows: Any) -> Callable[[], Any]:
        """A step of a loop of one's own, under the strategy."""
        strategy = self._strategy
        batches = iter(strategy.experimental_distribute_dataset(rows))

        def replica(x: Any, y: Any) -> None:
            with tf.GradientTape() as tape:
                outputs = sum_of_outputs(y, model(x, training=True))
                loss = tf.reduce_mean(outputs) / strategy.num_replicas_in_sync
            variables = model.trainable_variables
            model.optimizer.apply(tape.gradient(loss, variables), variables)

        @tf.function  # type: ignore[untyped-decorator]
        def step(x: Any, y: Any) -> None:
            strategy.run(replica, args=(x, y))

        return lambda: step(*next(batches))

    def steps(self, job: str, count: int, warm_up: int) -> dict[str, Any]:
        """Runs steps back to back, as one epoch; answers as worker.py does."""
        sent = sent_bytes()
        stamps = self._fit(job, warm_up + count, warm_up)
        used_s = cpu_s() - stamps.began_cpu_s
        return {
            "ends": [*stamps.starts[warm_up:], stamps.end],
            "cpu_s": used_s / count,
            "sent_bytes": (sent_bytes() - sent) / (warm_up + count),
        }

    def record(self, job: str, warm_up: int) -> dict[str, Any]:
        """One steady step, the last of an epoch; answers as worker.py does."""
        with link_samples() as samples:
            stamps = self._fit(job, warm_up + 1, warm_up)
        begin = stamps.starts[-1]
        events = self._jobs[job].model.recorder.events
        return {
            "step_s": stamps.end - begin,
            "layers": [(n, k, b - begin, e - begin) for n, k, b, e in events],
            "sent": [(at - begin, sent) for at, sent in samples if at >= begin],
        }

    def weights(self, job: str) -> list[float]:
        """The first and the last element of every variable."""
        values = (variable.numpy() for variable in self._jobs[job].model.trainable_variables)
        return [float(value[end]) for value in values for end in (0, -1)]

    def quit(self) -> None:
        """Ends the rank."""
        for job in list(self._jobs):
            self.drop(job)
        if self._hvd is not None:
            self._hvd.shutdown()


if __name__ == "__main__":
    serve(lambda: Worker(sys.argv[1]))
