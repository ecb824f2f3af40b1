"""The profile of a step under ParameterServerStrategy: its graph, timed by the job's own traces."""

from __future__ import annotations

import itertools
import os
import statistics
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tensorflow as tf

from hvd_order.base.errors import InvalidUsage
from hvd_order.base.link.busy_union import LinkUse, ReceivedTimes, link_use
from hvd_order.planning.files.profile import LEAST_RUNS, Profile, Timing
from hvd_order.servers.costs import Cost, ServerCosts, StrategySteps, cost_of
from hvd_order.tensorflow.gradients.step import tensorflow_variable
from hvd_order.tensorflow.profiler import machine_of, unique
from hvd_order.tensorflow.strategy.graph import StepGraph, step_graph
from hvd_order.tensorflow.strategy.own_times import own_times
from hvd_order.tensorflow.strategy.trace import Run, find_file, read_runs, runs_of
from hvd_order.tensorflow.xplane import owner_of

__all__ = ["WARM_UP", "concrete_step", "profile_of_strategy"]

WARM_UP = 3
"""Steps of a trace that are left out, the first ones."""
_S = 1e-12  # of a picosecond


def profile_of_strategy(
    strategy: Any,
    step: Any,
    variables: Sequence[Any],
    args: Sequence[Any] = (),
    *,
    worker: str | os.PathLike[str],
    servers: Sequence[str | os.PathLike[str]],
    model: str = "model",
    warm_up: int = WARM_UP,
) -> Profile:
    """Makes a profile of what a ClusterCoordinator schedules, from traces of its processes.

    Call it in the coordinator's process. Each traced process has called
    ``tf.profiler.experimental.start(folder)`` and ``stop()``, or was asked to by
    ``tf.profiler.experimental.client.trace``, while one worker ran steps back to back.

    Args:
        strategy: the ParameterServerStrategy.
        step: the ``tf.function`` that is scheduled, itself; it must use its variables itself, not
            in another ``tf.function`` that it calls.
        variables: of TensorFlow or Keras, that it trains, in the order in which they were made.
        args: what it is scheduled with, or tensors like these. Of per-worker values the first
            counts.
        worker: the worker's ``*.xplane.pb`` file, or a folder with no other one in it.
        servers: the same of each server.
        model: descriptive name.
        warm_up: steps of the trace that are left out, the first ones.

    Returns:
        A profile of the worker's operations, with durations in seconds by step, and with what
        TensorFlow's servers cost: ``servers.update`` of one parameter of n bytes takes ``seconds +
        n * seconds_per_byte``; ``servers.answer`` are the fetches of parameters, whose bandwidth
        is *at least* what it says. Pushes and the work of both ends are not in a trace.
        ``.write(path)`` makes the file that ``hvd-order predict`` reads.

    Raises:
        InvalidUsage: a file is broken, lacks the step or has fewer than 5 runs of it behind the
            warm-up; the step's graph cannot be cut at its variables; or traces and graph differ.
            The message names what does not match.
        OSError: a file does not exist.
    """
    if warm_up < 0:
        raise InvalidUsage(f"a warm-up of {warm_up} steps; expected 0 or more")
    plain = [tensorflow_variable(variable) for variable in variables]
    if not plain or not servers:
        raise InvalidUsage(
            f"{len(plain)} variables and traces of {len(servers)} servers; expected at least one"
        )
    names = unique([str(getattr(v, "path", v.name)) for v in variables])
    function, traced, first = concrete_step(strategy, step, args)
    graph = step_graph(traced, plain, names)
    file = find_file(Path(worker))
    runs = _steady(runs_of(function, file), warm_up, file)
    timings = _timings(graph, list(runs.values()), file)
    updates = _updates(graph, runs, [find_file(Path(server)) for server in servers])
    costs = ServerCosts(
        len(servers),
        1,
        "async",
        "server",
        LinkUse(0, 0, 0.0, None, False),
        _fetches(graph, list(runs.values())),
        updates,
        Cost(0.0, 0.0, True),
        Cost(0.0, 0.0, True),
        strategy=StrategySteps(_fetch_orders(graph, list(runs.values()), file), _between_s(runs)),
    )
    machine = machine_of([part for part in tf.nest.flatten(first) if hasattr(part, "shape")])
    return Profile(model, machine, graph.parameters, graph.ops, timings, servers=costs)


def _of_one_worker(part: Any) -> Any:
    """What a worker gets; of what is on the worker, its specification."""
    if isinstance(part, tf.distribute.experimental.coordinator.PerWorkerValues):
        part = part._values[0]
    if isinstance(part, tf.distribute.coordinator.RemoteValue):
        part = part._type_spec
    return part


def concrete_step(strategy: Any, step: Any, args: Sequence[Any]) -> tuple[str, Any, Any]:
    """Name and graph of what the coordinator schedules, and what one worker gets of ``args``."""
    first = tf.nest.map_structure(_of_one_worker, tuple(args))
    with strategy.scope():  # in which the coordinator traced it: otherwise it is traced anew
        concrete = step.get_concrete_function(*first)
    name = concrete.name
    return name.decode() if isinstance(name, bytes) else str(name), concrete.graph, first


def _steady(runs: Mapping[int, Run], warm_up: int, file: Path) -> dict[int, Run]:
    """The runs behind the warm-up. The last one may have been cut off, and tells the least."""
    whole = {number: run for number, run in runs.items() if run.received and run.sent}
    kept = dict(list(whole.items())[warm_up:])
    if len(kept) < LEAST_RUNS:
        raise InvalidUsage(
            f"{file} has {len(whole)} whole runs of the step, {len(kept)} behind a warm-up of "
            f"{warm_up}; at least {LEAST_RUNS} are needed: trace more steps"
        )
    return kept


def _timings(graph: StepGraph, runs: Sequence[Run], file: Path) -> dict[str, Timing]:
    """Durations of the worker's operations; 0 of what TensorFlow has merged into another one."""
    ops = {op.name: op for op in graph.ops}
    ran = {owner_of(name, ops) for run in runs for name, _ in run.ops} - {None}
    if not ran:
        raise InvalidUsage(
            f"{file} has none of the step's {len(ops)} operations, such as {graph.ops[0].name!r}"
        )
    _check_sent(graph, ran, runs, file)
    waits: dict[str, set[str]] = {}
    for op in graph.ops:  # each behind its inputs
        merged = [waits[name] for name in op.inputs if name not in ran]
        waits[op.name] = set(op.reads).union(*merged)
    seconds: dict[str, list[float]] = {name: [] for name in ops}
    for run in runs:
        came = {
            parameter: run.received[node].end_ps
            for node, parameter in graph.fetches.items()
            if node in run.received
        }
        intervals = [
            (owner, timed) for name, timed in run.ops if (owner := owner_of(name, ops)) is not None
        ]
        ready = {
            name: max((came[one] for one in waits[name] if one in came), default=0)
            for name in {owner for owner, _ in intervals}
        }
        took = own_times(intervals, ready)
        for name, each in seconds.items():
            each.append(took.get(name, 0) * _S)
    return {name: Timing.of(each) for name, each in seconds.items()}


def _check_sent(
    graph: StepGraph, ran: Container[str | None], runs: Iterable[Run], file: Path
) -> None:
    """Refuses a trace in which a gradient of the graph does not leave the worker."""
    sent = {node for run in runs for node in run.sent}
    nodes: dict[str, set[str]] = {}
    for op in graph.ops:
        # Where TensorFlow has removed an operation, its input is sent.
        removed = [] if op.name in ran else [nodes[name] for name in op.inputs]
        nodes[op.name] = {op.name}.union(*removed)
    for op in graph.ops:
        if op.produces and not any(owner_of(node, nodes[op.name]) for node in sent):
            raise InvalidUsage(
                f"in {file} the gradient of {op.produces[0]!r} does not leave the worker: nothing "
                f"is sent by {op.name!r}"
            )


def _fetch_orders(graph: StepGraph, runs: Sequence[Run], file: Path) -> tuple[tuple[int, ...], ...]:
    """Of each run, numbers of the parameters in the order in which they came."""
    numbers = {parameter.name: i for i, parameter in enumerate(graph.parameters)}
    orders = []
    for run in runs:
        came = sorted((one.end_ps, node) for node, one in run.received.items())
        fetched = [graph.fetches[node] for _, node in came if node in graph.fetches]
        order = tuple(dict.fromkeys(numbers[name] for name in fetched))  # several reads: the first
        if len(order) < len(numbers):
            name = next(name for name, i in numbers.items() if i not in order)
            nodes = [node for node, each in graph.fetches.items() if each == name]
            raise InvalidUsage(
                f"in {file} no worker fetches {name!r}: nothing comes from "
                f"{' or '.join(map(repr, nodes)) or 'a read of it'}"
            )
        orders.append(order)
    return tuple(orders)


def _fetches(graph: StepGraph, runs: Sequence[Run]) -> LinkUse:
    """The link from the servers, by the union of its transfers' intervals.

    An interval begins with the request. What passes until the first byte counts as well, so the
    link may be faster.
    """
    sizes = {parameter.name: parameter.size_bytes for parameter in graph.parameters}
    received = []
    for run in runs:
        for node, one in run.received.items():
            if node in graph.fetches:
                begin, end = one.begin_ps // 1000, one.end_ps // 1000
                size = sizes[graph.fetches[node]]
                received.append(ReceivedTimes(size, 0, begin, begin, end, end))
    return replace(link_use([received], True), at_least=True)


def _between_s(runs: Mapping[int, Run]) -> float:
    """Median time between the end of a step on a worker and the next step's first request."""
    pauses = []
    for run, following in itertools.pairwise(runs.values()):
        if run.end_ps is not None and following.asked_ps is not None:
            pauses.append(max(0, following.asked_ps - run.end_ps) * _S)
    return statistics.median(pauses)


def _updates(graph: StepGraph, runs: Iterable[int], files: Sequence[Path]) -> Cost:
    """What a server's update of a parameter takes: all its operations, added up in each step."""
    sizes = {parameter.name: parameter.size_bytes for parameter in graph.parameters}
    samples: list[tuple[int, float]] = []
    updated: set[str] = set()
    for file in files:
        found = read_runs(file)
        for number in runs:
            took: dict[str, int] = defaultdict(int)
            for name, timed in found[number].ops if number in found else ():
                owner = owner_of(name, graph.updates)
                if owner is not None:
                    took[graph.updates[owner]] += timed.end_ps - timed.begin_ps
            samples += [(sizes[name], each * _S) for name, each in took.items()]
            updated |= took.keys()
    missing = [name for name in sizes if name not in updated]
    if missing:
        others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise InvalidUsage(
            f"no update of {missing[0]!r}{others} is in {', '.join(map(str, files))}; trace all "
            "servers in the same steps as the worker"
        )
    return cost_of(samples)
