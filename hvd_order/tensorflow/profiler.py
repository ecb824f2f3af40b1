"""Records the profile of a training step for the planner (docs/guides/planning.md), op by op.

The dependency graph is that of the traced step. TensorFlow's profiler measures the duration of its
operations in several runs.
"""

from __future__ import annotations

import platform
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from hvd_order.base.errors import InvalidUsage
from hvd_order.planning.files.profile import LEAST_RUNS, Profile, Timing
from hvd_order.planning.graph.graph import GraphOp, GraphParameter, Phase
from hvd_order.tensorflow.gradients.consumption import joins
from hvd_order.tensorflow.gradients.step import tensorflow_variable
from hvd_order.tensorflow.xplane import SUFFIX, events_by_thread, node_of, owner_of, read_space

__all__ = ["record_profile"]

_WARM_UP = 3


def record_profile(
    loss_of: Callable[..., Any],
    variables: Sequence[Any],
    batch: Sequence[Any],
    *,
    model: str = "model",
    runs: int = 8,
) -> Profile:
    """Runs forward and backward passes of one batch in this process, and profiles them.

    Args:
        loss_of: the loss of a batch, say ``lambda x, y: loss(y, model(x, training=True))``.
        variables: of TensorFlow or Keras, whose gradients will travel.
        batch: tensors or arrays for `loss_of`.
        model: descriptive name.
        runs: number of timed runs.

    Returns:
        A profile without a link; ``.write(path)`` makes the file that ``hvd-order advise``,
        ``plan`` and ``tune`` read.

    Raises:
        InvalidUsage: fewer than 5 runs, or no variable has a gradient.
    """
    if runs < LEAST_RUNS:
        raise InvalidUsage(f"{runs} runs; at least {LEAST_RUNS} are needed")
    plain = [tensorflow_variable(variable) for variable in variables]
    tensors = [tf.convert_to_tensor(part) for part in batch]
    concrete, forward = _traced(loss_of, plain, tensors)
    gradients = concrete.structured_outputs
    used = [i for i, gradient in enumerate(gradients) if gradient is not None]
    if not used:
        raise InvalidUsage("no variable has a gradient: the loss depends on none of them")
    names = unique([str(getattr(v, "path", v.name)) for v in variables])
    found = list(joins(concrete.graph, plain))
    known = {join.op.name for join in found}
    produced = _produced(concrete.graph.outputs, [names[i] for i in used], known)
    seconds = _timed(lambda: concrete(*tensors), known, runs)
    ops, timings = [], {}
    for join in found:
        name = join.op.name
        phase: Phase = "forward" if name in forward else "backward"
        inputs = tuple(one.name for one in join.inputs if one.name in known)
        reads = tuple(names[i] for i in join.reads if i in used)
        ops.append(GraphOp(name, 0.0, inputs, reads, tuple(produced.get(name, ())), phase=phase))
        timings[name] = Timing.of(seconds[name])
    parameters = tuple(
        GraphParameter(names[i], plain[i].shape.num_elements() * plain[i].dtype.size) for i in used
    )
    return Profile(model, machine_of(tensors), parameters, tuple(ops), timings)


def _traced(
    loss_of: Callable[..., Any], variables: Sequence[Any], tensors: Sequence[Any]
) -> tuple[Any, set[str]]:
    """The function that returns the gradients, and the names of its forward operations."""
    forward: set[str] = set()

    @tf.function(autograph=False)
    def step(*tensors: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(*tensors)
        forward.update(op.name for op in tf.compat.v1.get_default_graph().get_operations())
        return [_dense_part(gradient) for gradient in tape.gradient(loss, variables)]

    return step.get_concrete_function(*tensors), forward


def _produced(
    outputs: Sequence[Any], parameters: Sequence[str], known: set[str]
) -> dict[str, list[str]]:
    """Names of operations -> the parameters whose gradients they compute."""
    produced: dict[str, list[str]] = defaultdict(list)
    for parameter, output in zip(parameters, outputs, strict=True):
        source = output.op
        while source.type == "Identity" and source.inputs[0].op.name in known:
            source = source.inputs[0].op  # of the return, behind all that computes
        produced[source.name].append(parameter)
    return produced


def _dense_part(gradient: Any) -> Any:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _timed(run: Callable[[], Any], known: set[str], runs: int) -> dict[str, list[float]]:
    """Seconds of each operation in each run; 0 if the profiler does not list it."""
    for _ in range(_WARM_UP):
        run()
    seconds: dict[str, list[float]] = {name: [0.0] * runs for name in known}
    for number in range(runs):
        for name, took in _run_times(run).items():
            owner = owner_of(name, known)
            if owner is not None:
                seconds[owner][number] += took
    return seconds


def _run_times(run: Callable[[], Any]) -> dict[str, float]:
    """Duration of each node of the graph in one run, by name."""
    times: dict[str, float] = defaultdict(float)
    with tempfile.TemporaryDirectory(prefix="hvd_order_profile_") as folder:
        tf.profiler.experimental.start(folder)
        try:
            run()
        finally:
            tf.profiler.experimental.stop()
        for file in Path(folder).rglob(f"*{SUFFIX}"):
            for thread in events_by_thread(read_space(file)):
                for event in thread:
                    node = node_of(event.name)
                    if node is not None:
                        times[node[0]] += (event.end_ps - event.begin_ps) * 1e-12
    return times


def unique(names: Sequence[str]) -> list[str]:
    """The names, with a number behind those that were there before."""
    seen: dict[str, int] = {}
    found = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        found.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return found


def machine_of(batch: Sequence[Any]) -> dict[str, str]:
    """What a profile says about this machine and the batch's tensors."""
    devices = tf.config.list_logical_devices("GPU")
    return {
        "host": platform.node(),
        "processor": devices[0].name if devices else platform.processor() or platform.machine(),
        "tensorflow": tf.__version__,
        "batch": " ".join(str(list(one.shape)) for one in batch),
    }
