"""Imports a trace of ``torch.profiler`` as a profile. Needs no framework.

A trace has names, times, shapes and autograd's sequence numbers, but neither parameters nor
tensors. The importer infers them. Autograd accumulates a gradient (``AccumulateGrad``, whose input
has the parameter's shape) right after the last backward node that adds to it, since autograd's
engine prefers ``AccumulateGrad`` to all other ready nodes. The forward op with the sequence number
of this backward node is the first reader of the parameter. docs/guides/planning.md says how to
record a trace, and what a trace lacks.
"""

from __future__ import annotations

import gzip
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvd_order.base.errors import InvalidUsage
from hvd_order.planning.files.profile import LEAST_RUNS, Profile, Timing, unique
from hvd_order.planning.graph.graph import GraphOp, GraphParameter, Phase

__all__ = ["profile_of_trace"]

_STEP = "ProfilerStep#"
_UPDATES = ("Optimizer.step#", "Optimizer.zero_grad#")
_NODE = "autograd::engine::evaluate_function: "
_ACCUMULATE = "torch::autograd::AccumulateGrad"
# Communication is measured as a link, not as an op.
_LEFT_OUT = ("c10d::", "_c10d_functional::", "nccl:", "gloo:", "mpi:", "ucc:")
_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_ELEMENT_BYTES = {
    "float": 4, "double": 8, "c10::Half": 2, "c10::BFloat16": 2,
    "c10::complex<float>": 8, "c10::complex<double>": 16, "c10::complex<c10::Half>": 4,
    "c10::Float8_e4m3fn": 1, "c10::Float8_e5m2": 1,
}  # fmt: skip
_HOW = (
    "record it with torch.profiler.profile(record_shapes=True, "
    "schedule=torch.profiler.schedule(wait=1, warmup=1, active=8)) and prof.step() behind each "
    "step (documentation: Tune slices and order)"
)


def profile_of_trace(path: str | Path) -> Profile:
    """Reads a trace that ``export_chrome_trace`` wrote, as JSON or gzipped JSON.

    Ops are chained in the order in which they ran. Parameters are named after their first reader
    and their shape.

    Raises:
        InvalidUsage: the file is no such trace, is incomplete, or holds steps from which no
            profile can be made; the message says how to record a trace.
        OSError: the file does not exist.
    """
    source = Path(path)
    try:
        document = _document(source)
        return _profile(document, source.name.partition(".")[0])
    except InvalidUsage as error:
        raise InvalidUsage(f"{source}: {error}") from None


def _profile(document: Mapping[str, Any], model: str) -> Profile:
    trace = _ChromeTrace(document["traceEvents"])
    steps = _alike([_units_of(step, trace) for step in trace.steps])
    first = steps[0]
    names = unique([f"{unit.phase}/{unit.name}" for unit in first])
    reads, produces, parameters = _parameters(first, names)
    ops = [
        GraphOp(
            name,
            0.0,
            (names[i - 1],) if i else (),
            tuple(reads[i]),
            tuple(produces[i]),
            unit.resource,
            unit.phase,
        )
        for i, (name, unit) in enumerate(zip(names, first, strict=True))
    ]
    seconds = zip(*([unit.seconds for unit in step] for step in steps), strict=True)
    devices = [str(d.get("name", "?")) for d in document.get("deviceProperties") or []]
    return Profile(
        model,
        {
            "host": str(document.get("host_name", "?")),
            "device": ", ".join(devices) or "cpu",
            "source": "trace of torch.profiler",
        },
        tuple(parameters),
        tuple(ops),
        {name: Timing.of(runs) for name, runs in zip(names, seconds, strict=True)},
        clock="cuda_event" if trace.kernels else "wall",
    )


def _parameters(
    units: Sequence[_Unit], names: Sequence[str]
) -> tuple[dict[int, list[str]], dict[int, list[str]], list[GraphParameter]]:
    """Reads and products by op, and all parameters in order of their first readers."""
    readers = {number: i for i, unit in enumerate(units) for number in unit.sequences}
    backward_begins = min((i for i, u in enumerate(units) if u.phase == "backward"), default=0)
    found: list[tuple[int, int, _AccumulatedGradient]] = []  # reader, producer
    for i, unit in enumerate(units):
        if unit.gradient is None:
            continue
        reader = readers.get(unit.node)
        if reader is None:
            raise InvalidUsage(
                f"no forward op has the sequence number of the gradient that {names[i]!r} "
                f"accumulates; all of a step has to lie between two calls of prof.step(): {_HOW}"
            )
        if reader > backward_begins:
            raise InvalidUsage(
                f"{names[reader]!r} ran after backward had begun, and {names[i]!r} accumulates its "
                "gradient: a step with several backward passes (accumulation, a GAN, reentrant "
                "checkpoints) does not show which gradients belong to one parameter. Use "
                "hvd-order profile train.py"
            )
        found.append((reader, i, unit.gradient))
    if not found:
        raise InvalidUsage(f"it has no backward pass with gradients of parameters; {_HOW}")
    # Parameters that one op reads stand in the order of its arguments.
    found.sort(key=lambda each: (each[0], _position(each[2].shape, units[each[0]].shapes), each[1]))
    called = unique([f"{units[reader].name} {gradient.shape}" for reader, _, gradient in found])
    reads: defaultdict[int, list[str]] = defaultdict(list)
    produces: defaultdict[int, list[str]] = defaultdict(list)
    for name, (reader, producer, _) in zip(called, found, strict=True):
        reads[reader].append(name)
        produces[producer].append(name)
    sizes = [gradient.size_bytes for _, _, gradient in found]
    return reads, produces, [GraphParameter(n, s) for n, s in zip(called, sizes, strict=True)]


def _position(shape: str, shapes: Sequence[str]) -> int:
    return shapes.index(shape) if shape in shapes else len(shapes)


# --- the trace as a tree -----------------------------------------------------------------------


@dataclass
class _TraceEvent:
    name: str
    begin_us: float
    duration_us: float
    thread: Any
    is_op: bool
    args: Mapping[str, Any]
    inside: list[_TraceEvent] = field(default_factory=list)

    @property
    def end_us(self) -> float:
        return self.begin_us + self.duration_us

    @property
    def sequence(self) -> int | None:
        number = self.args.get("Sequence number")
        return number if isinstance(number, int) and number >= 0 else None

    def all(self) -> Iterator[_TraceEvent]:
        yield self
        for event in self.inside:
            yield from event.all()


class _ChromeTrace:
    """Steps with their events, and the kernels that ops started on a device."""

    def __init__(self, content: Sequence[Any]) -> None:
        self.kernels: defaultdict[int, list[tuple[str, float]]] = defaultdict(list)
        by_thread: defaultdict[Any, list[_TraceEvent]] = defaultdict(list)
        for each in content:
            if not isinstance(each, Mapping) or each.get("ph") != "X":
                continue
            category, args = each.get("cat"), each.get("args") or {}
            if category in _ON_DEVICE:
                stream = f"stream {args.get('stream', '?')}"
                self.kernels[args.get("External id", -1)].append((stream, _us(each, "dur") / 1e6))
            elif category in ("cpu_op", "user_annotation"):
                thread = (each.get("pid"), each.get("tid"))
                begin_us, duration_us = _us(each, "ts"), _us(each, "dur")
                by_thread[thread].append(
                    _TraceEvent(str(each.get("name")), begin_us, duration_us, thread,
                           category == "cpu_op", args)
                )  # fmt: skip
        roots = {thread: _nested(events) for thread, events in by_thread.items()}
        self.steps = [
            event
            for trees in roots.values()
            for root in trees
            for event in root.all()
            if event.name.startswith(_STEP)
        ]
        if not self.steps:
            raise InvalidUsage(f"it does not say where steps begin; {_HOW}")
        self.steps.sort(key=lambda step: step.begin_us)
        # With a device, backward runs in a thread of its own.
        mine = self.steps[0].thread
        others = [root for thread, trees in roots.items() if thread != mine for root in trees]
        for step in self.steps:
            step.inside += [
                root
                for root in others
                if step.begin_us <= root.begin_us < step.end_us and root.name.startswith(_NODE)
            ]
            step.inside.sort(key=lambda event: event.begin_us)
        streams = Counter(stream for runs in self.kernels.values() for stream, _ in runs)
        self.main_stream = streams.most_common(1)[0][0] if streams else "compute"


def _nested(events: list[_TraceEvent]) -> list[_TraceEvent]:
    """Nests the events of one thread into trees by their times."""
    roots: list[_TraceEvent] = []
    above: list[_TraceEvent] = []
    for event in sorted(events, key=lambda e: (e.begin_us, -e.duration_us, _id(e))):
        while above and above[-1].end_us <= event.begin_us:
            above.pop()
        (above[-1].inside if above else roots).append(event)
        above.append(event)
    return roots


def _id(event: _TraceEvent) -> int:
    number = event.args.get("External id", 0)
    return number if isinstance(number, int) else 0


# --- the units of a step -----------------------------------------------------------------------


@dataclass(frozen=True)
class _AccumulatedGradient:
    """The input of one AccumulateGrad."""

    shape: str
    size_bytes: int


@dataclass
class _Unit:
    """An op of the profile.

    Attributes:
        sequences: sequence numbers of the autograd nodes that the op made.
        shapes: shapes of the op's inputs, followed by those of its inner ops.
        gradient: gradient that the op accumulates.
        node: sequence number of the backward node that computed the gradient.
    """

    name: str
    phase: Phase
    resource: str
    seconds: float
    sequences: tuple[int, ...] = ()
    shapes: tuple[str, ...] = ()
    gradient: _AccumulatedGradient | None = None
    node: int = -1


def _units_of(step: _TraceEvent, trace: _ChromeTrace) -> list[_Unit]:
    units: list[_Unit] = []
    last_node: dict[Any, int] = {}  # by thread: sequence number of its last backward node
    for event, phase in _ops(step.inside, "forward"):
        resource, seconds = _time(event, trace)
        if phase != "backward":
            sequences = tuple(e.sequence for e in event.all() if e.sequence is not None)
            shapes = tuple(_text(s) for e in event.all() for s in e.args.get("Input Dims") or ())
            name = event.name.removeprefix("aten::")
            units.append(_Unit(name, phase, resource, seconds, sequences, shapes))
        elif event.name == _NODE + _ACCUMULATE:
            units.append(
                _Unit("AccumulateGrad", phase, resource, seconds, gradient=_gradient(event),
                      node=last_node.get(event.thread, -1))
            )  # fmt: skip
        else:
            name = event.name.removeprefix(_NODE)
            units.append(_Unit(name, phase, resource, seconds))
            last_node[event.thread] = -1 if event.sequence is None else event.sequence
    return units


def _ops(events: Iterable[_TraceEvent], phase: Phase) -> Iterator[tuple[_TraceEvent, Phase]]:
    """Events that become ops: ops with at most one autograd node, and backward nodes."""
    for event in events:
        if event.name.startswith(_LEFT_OUT):
            continue
        if event.name.startswith(_NODE):
            yield event, "backward"
        elif event.is_op and not _is_composed(event):
            yield event, phase
        else:
            updates = event.name.startswith(_UPDATES)
            yield from _ops(event.inside, "update" if updates else phase)


def _is_composed(event: _TraceEvent) -> bool:
    """Whether autograd records the inner ops instead of the op itself."""
    mine = event.sequence
    inside = (e for child in event.inside for e in child.all())
    return any(
        e.name.startswith(_NODE) or (e.sequence is not None and (mine is None or e.sequence > mine))
        for e in inside
    )


def _time(event: _TraceEvent, trace: _ChromeTrace) -> tuple[str, float]:
    """Resource that an op occupies, and for how many seconds."""
    if not trace.kernels:
        return "compute", event.duration_us / 1e6
    by_stream = {trace.main_stream: 0.0}
    for each in event.all():
        for stream, seconds in trace.kernels.get(_id(each), ()):
            by_stream[stream] = by_stream.get(stream, 0.0) + seconds
    return max(by_stream.items(), key=lambda item: item[1])[0], math.fsum(by_stream.values())


def _gradient(event: _TraceEvent) -> _AccumulatedGradient:
    args = next((e.args for e in event.inside if e.name == _ACCUMULATE), event.args)
    dimensions, types = args.get("Input Dims"), args.get("Input type")
    if not dimensions or not types:
        raise InvalidUsage(f"it has no shapes, so sizes of parameters are unknown; {_HOW}")
    shape, kind = dimensions[0], str(types[0])
    if kind not in _ELEMENT_BYTES:
        raise InvalidUsage(
            f"a gradient has elements of type {kind!r}; known are {', '.join(_ELEMENT_BYTES)}"
        )
    return _AccumulatedGradient(_text(shape), math.prod(shape) * _ELEMENT_BYTES[kind])


def _text(shape: Sequence[Any]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _alike(steps: Sequence[list[_Unit]]) -> list[list[_Unit]]:
    """The steps that ran the most frequent sequence of ops."""
    kinds = [tuple((u.name, u.phase, u.gradient, u.resource) for u in step) for step in steps]
    common, count = Counter(kinds).most_common(1)[0]
    if count < LEAST_RUNS:
        raise InvalidUsage(
            f"it has {len(steps)} steps, of which at most {count} ran the same ops; "
            f"{LEAST_RUNS} are needed: {_HOW}"
        )
    return [step for step, kind in zip(steps, kinds, strict=True) if kind == common]


# --- small things ------------------------------------------------------------------------------


def _document(source: Path) -> Mapping[str, Any]:
    content = source.read_bytes()
    try:
        if content.startswith(b"\x1f\x8b"):
            content = gzip.decompress(content)
        document = json.loads(content)
    except (ValueError, OSError, EOFError) as error:
        raise InvalidUsage(f"not JSON ({error})") from None
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise InvalidUsage('no Chrome trace: it has no list under "traceEvents"')
    return document


def _us(event: Mapping[str, Any], key: str) -> float:
    value = event.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidUsage(
            f'"{key}" of the event {event.get("name")!r} is {value!r}; expected a number'
        )
    return float(value)
