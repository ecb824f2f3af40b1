"""Profiles an unchanged coordinator script: ``hvd-order profile --tensorflow-servers``.

Workers and servers trace themselves: each tf.distribute.Server answers requests of TensorFlow's
profiler, and writes what it has traced to a folder that the coordinator names.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tensorflow as tf

from hvd_order.base.bounded import within
from hvd_order.base.errors import InvalidUsage
from hvd_order.planning.files.profile import Profile
from hvd_order.planning.run_script import Enough, run_script, too_few
from hvd_order.tensorflow.strategy.graph import trained_variables
from hvd_order.tensorflow.strategy.profile import WARM_UP, concrete_step, profile_of_strategy
from hvd_order.tensorflow.strategy.trace import find_file, runs_of

__all__ = ["profile_coordinator"]

_FIRST_MS = 1000
_ENDS_WITHIN_S = 120.0  # beside the length of the trace: TensorFlow writes files of many megabytes


def profile_coordinator(script: Path, arguments: Sequence[str], runs: int, output: Path) -> Profile:
    """Runs a coordinator until enough steps of its first worker have been traced, then ends it.

    The step is the ``tf.function`` that it schedules first.

    Args:
        script: a Python file that schedules steps by a ClusterCoordinator.
        arguments: arguments of the script.
        runs: steps to record, at least 5.
        output: file of the profile. Traces are kept beside it until it is made, in a folder that
            workers and servers must see.

    Raises:
        InvalidUsage: the script schedules no ``tf.function`` or ends too early, or what
            `profile_of_strategy` raises.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="traces-", dir=output.parent.resolve()) as folder:
        recorder = _JobTracer(script, runs + WARM_UP, Path(folder))
        try:
            run_script(script, arguments)
        finally:
            recorder.close()
        return recorder.profile()


class _JobTracer:
    """Traces a job while its coordinator schedules steps."""

    def __init__(self, script: Path, runs: int, folder: Path) -> None:
        self._script = script
        self._runs = runs
        self._folder = folder
        self._coordinator: Any = None
        self._step: Any = None
        self._args: Sequence[Any] = ()
        self._function = ""
        self._scheduled = 0
        self._ended = False
        self._found = 0
        self._trace_ms = _FIRST_MS
        self._tracer = threading.Thread(target=self._trace, daemon=True)
        self._error: Exception | None = None
        self._worker = self._folder / "worker"
        self._servers: list[Path] = []
        self._original = tf.distribute.coordinator.ClusterCoordinator.schedule
        recorder = self

        def schedule(coordinator: Any, fn: Any, args: Any = None, kwargs: Any = None) -> Any:
            return recorder._schedule(coordinator, fn, args, kwargs)

        tf.distribute.coordinator.ClusterCoordinator.schedule = schedule

    def _schedule(self, coordinator: Any, fn: Any, args: Any, kwargs: Any) -> Any:
        scheduled = self._original(coordinator, fn, args, kwargs)
        if self._step is None and hasattr(fn, "get_concrete_function"):
            coordinator.join()  # it is traced, and the worker knows it
            self._coordinator, self._step, self._args = coordinator, fn, args or ()
            self._function = concrete_step(coordinator.strategy, fn, self._args)[0]
            self._tracer.start()
        self._scheduled += fn is self._step
        if self._step is not None and not self._tracer.is_alive():
            raise Enough
        return scheduled

    def _trace(self) -> None:
        """Traces for longer and longer, until a trace has enough steps."""
        cluster = self._coordinator.strategy._cluster_resolver.cluster_spec().as_dict()
        addresses = [cluster["worker"][0], *cluster["ps"]]
        try:
            while self._found < self._runs and not self._ended:
                milliseconds = self._trace_ms
                folder = self._folder / str(milliseconds)
                places = [folder / str(i) for i in range(len(addresses))]
                with ThreadPoolExecutor(len(addresses)) as each:
                    list(each.map(
                        lambda pair, ms=milliseconds: tf.profiler.experimental.client.trace(
                            f"grpc://{pair[0]}", str(pair[1]), ms
                        ),
                        zip(addresses, places, strict=True),
                    ))  # fmt: skip
                self._worker, *self._servers = places
                whole = runs_of(self._function, find_file(self._worker)).values()
                self._found = sum(bool(run.received and run.sent) for run in whole)
                self._trace_ms *= 2
        except Exception as error:
            self._error = error

    def close(self) -> None:
        """Waits for the trace and for the steps under way."""
        tf.distribute.coordinator.ClusterCoordinator.schedule = self._original
        self._ended = True
        if self._step is None:
            return
        self._tracer.join(self._trace_ms / 1000 + _ENDS_WITHIN_S)
        try:  # TensorFlow waits without limit for a worker that is lost
            if not self._tracer.is_alive() and self._error is None:
                within(_ENDS_WITHIN_S, self._coordinator.join)
        except TimeoutError as error:
            self._error = error
        if self._tracer.is_alive() or isinstance(self._error, TimeoutError):
            self._error = InvalidUsage(
                f"the worker and servers of {self._script} have not ended a trace and their steps "
                f"in {_ENDS_WITHIN_S:g} s: see whether one of these processes is lost"
            )

    def profile(self) -> Profile:
        """The profile, from the last trace."""
        if self._step is None:
            raise InvalidUsage(
                f"{self._script} has scheduled no tf.function; expected the coordinator of a "
                "ParameterServerStrategy, which calls ClusterCoordinator.schedule"
            )
        if self._error is not None:
            raise self._error
        if self._found < self._runs:
            raise too_few(self._script, self._scheduled, f"{self._runs} in one trace")
        strategy = self._coordinator.strategy
        graph = concrete_step(strategy, self._step, self._args)[1]
        return profile_of_strategy(
            strategy,
            self._step,
            trained_variables(graph),
            self._args,
            worker=self._worker,
            servers=self._servers,
            model=self._script.stem,
        )
