"""A profile: the measured operators of one worker's step, as a JSON file.

docs/guides/planning.md describes the file. Reading and writing needs no framework; the shim records
profiles.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from hvd_order.base.document import Fields, read_document, write_document
from hvd_order.base.errors import InvalidUsage
from hvd_order.base.link.link_model import LinkModel
from hvd_order.base.plan.parameter import parameter_from
from hvd_order.planning.files.profiled_servers import costs_from, document_of
from hvd_order.planning.graph.graph import Graph, GraphOp, GraphParameter, Phase
from hvd_order.servers.costs import ServerCosts

__all__ = [
    "LEAST_RUNS",
    "VERSION",
    "Clock",
    "MeasuredLink",
    "Profile",
    "Timing",
    "middle",
    "read_profile",
    "unique",
]

_KIND = "profile"
VERSION = 4
_WITHOUT_SERVERS = 2  # the newest version that knows no servers
LEAST_RUNS = 5

Clock = Literal["wall", "cuda_event"]


@dataclass(frozen=True)
class Timing:
    """Duration of an op over several runs.

    Attributes:
        runs: number of runs, at least 5.
        minimum_s: the duration on a dedicated resource, as in TicTac's time oracle.
        median_s: the expected duration of a run.
        spread_s: interquartile range.
        seconds: the duration in each step, in the order of the steps; empty where only the summary
            is known.

    Raises:
        InvalidUsage: too few runs, or impossible numbers.
    """

    runs: int
    minimum_s: float
    median_s: float
    spread_s: float
    seconds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.runs < LEAST_RUNS:
            raise InvalidUsage(f"{self.runs} runs; at least {LEAST_RUNS} are needed")
        numbers = (self.minimum_s, self.median_s, self.spread_s)
        if not all(math.isfinite(x) and x >= 0 for x in numbers) or self.minimum_s > self.median_s:
            raise InvalidUsage(
                f"minimum {self.minimum_s} s, median {self.median_s} s, spread {self.spread_s} s; "
                "expected finite numbers with 0 <= minimum <= median and 0 <= spread"
            )
        if self.seconds and not (
            len(self.seconds) == self.runs
            and all(math.isfinite(x) and x >= 0 for x in self.seconds)
        ):
            raise InvalidUsage(
                f"{len(self.seconds)} durations of {self.runs} runs; expected one each, not "
                "negative"
            )

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """Summarises the measured runs."""
        if not seconds:
            raise InvalidUsage(f"0 runs; at least {LEAST_RUNS} are needed")
        ordered = sorted(seconds)
        last = len(ordered) - 1
        spread = ordered[last - last // 4] - ordered[last // 4]
        return cls(len(ordered), ordered[0], middle(seconds), spread, tuple(seconds))


def middle(seconds: Sequence[float]) -> float:
    """The median; of an even number of durations the lower one, so that it was measured."""
    return sorted(seconds)[(len(seconds) - 1) // 2]


@dataclass(frozen=True)
class MeasuredLink:
    """The transport that was measured with the profile.

    Attributes:
        link: an all-reduce of n bytes among ``ranks`` ranks takes ``slice_cost_s`` and n times
            ``seconds_per_byte``.
        backend: "gloo", "nccl", "horovod", ...
    """

    link: LinkModel
    ranks: int
    backend: str


@dataclass(frozen=True)
class Profile:
    """A model's step on one worker.

    Attributes:
        model: descriptive name.
        machine: description of the machine: host, processor, versions, batch size.
        parameters, ops: as in a :class:`Graph`; durations follow from ``timings``.
        timings: timing of each op, by name.
        link: None if no transport was measured.
        clock: clock that timed the ops.
        servers: what parameter servers cost; None if none were measured.

    Raises:
        InvalidUsage: the graph is invalid, or ops and timings do not match.
    """

    model: str
    machine: Mapping[str, str]
    parameters: tuple[GraphParameter, ...]
    ops: tuple[GraphOp, ...]
    timings: Mapping[str, Timing]
    link: MeasuredLink | None = None
    clock: Clock = "wall"
    servers: ServerCosts | None = None

    def __post_init__(self) -> None:
        names = {op.name for op in self.ops}
        if names != set(self.timings):
            different = sorted(names ^ set(self.timings))
            raise InvalidUsage(
                f"{len(names)} ops but {len(self.timings)} timings; first that has one of the two "
                f"only: {different[0]!r}"
            )
        strategy = None if self.servers is None else self.servers.strategy
        if strategy is not None:
            numbers = list(range(len(self.parameters)))
            for order in strategy.fetch_orders:
                if sorted(order) != numbers:
                    raise InvalidUsage(
                        f"an order of {len(order)} fetches; expected each of the numbers 0 to "
                        f"{len(numbers) - 1} of the {len(numbers)} parameters once"
                    )
        durations = {name: timing.minimum_s for name, timing in self.timings.items()}
        ops = tuple(replace(op, duration_s=durations[op.name]) for op in self.ops)
        object.__setattr__(self, "ops", Graph(self.parameters, ops).ops)

    def graph(self, times: Literal["minimum", "median"] = "minimum") -> Graph:
        """The dependency graph.

        Args:
            times: "minimum" for ordering, as published; "median" for predicting real steps.
        """
        if times == "minimum":
            return Graph(self.parameters, self.ops)
        medians = [replace(op, duration_s=self.timings[op.name].median_s) for op in self.ops]
        return Graph(self.parameters, tuple(medians))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the file; an existing file is replaced atomically."""
        # Older versions of hvd_order read a file without servers.
        version = _WITHOUT_SERVERS if self.servers is None else VERSION
        write_document(path, _KIND, version, self._document())

    def _document(self) -> dict[str, Any]:
        link = self.link
        return {
            "model": self.model,
            "machine": dict(self.machine),
            "clock": self.clock,
            "link": link and {"backend": link.backend, "ranks": link.ranks, **asdict(link.link)},
            **({} if self.servers is None else {"servers": document_of(self.servers)}),
            "parameters": [asdict(parameter) for parameter in self.parameters],
            "ops": [
                {
                    "name": op.name,
                    "phase": op.phase,
                    "resource": op.resource,
                    "inputs": list(op.inputs),
                    "reads": list(op.reads),
                    "produces": list(op.produces),
                    **asdict(self.timings[op.name]),
                }
                for op in self.ops
            ],
        }


def read_profile(path: str | os.PathLike[str]) -> Profile:
    """Reads a file that :meth:`Profile.write` wrote.

    Raises:
        InvalidUsage: the file is no profile, has another version or an impossible content; the
            message names the file and the place in it.
        OSError: the file does not exist.
    """
    return read_document(path, _KIND, VERSION, _profile, oldest=_WITHOUT_SERVERS)


def _profile(top: Fields) -> Profile:
    model = top.take("model", str)
    machine = top.take("machine", dict)
    clock = top.choice("clock", get_args(Clock))
    link = top.take("link", dict, type(None))
    servers = costs_from(top.take("servers", dict)) if top.has("servers") else None
    parameters = [
        parameter_from(each, str(i)) for i, each in enumerate(top.take("parameters", list))
    ]
    ops = [_op(each, i) for i, each in enumerate(top.take("ops", list))]
    for key, value in machine.items():
        if not isinstance(value, str):
            raise InvalidUsage(f'"machine" has {key!r}: {value!r}; expected text')
    timings = {op.name: timing for op, timing in ops}
    if len(timings) < len(ops):  # Graph's error names the duplicate
        Graph(tuple(parameters), tuple(op for op, _ in ops))
    return Profile(
        model,
        machine,
        tuple(parameters),
        tuple(op for op, _ in ops),
        timings,
        None if link is None else _link(link),
        clock,
        servers,
    )


def _op(content: Any, number: int) -> tuple[GraphOp, Timing]:
    fields = Fields(content, f"op {number}")
    runs = fields.take("runs", int)
    low, median, spread = (fields.take(k, float) for k in ("minimum_s", "median_s", "spread_s"))
    seconds = fields.take("seconds", list)
    if not all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in seconds):
        raise InvalidUsage(f'{fields.where} has "seconds": {seconds!r}; expected numbers')
    try:
        timing = Timing(runs, low, median, spread, tuple(seconds))
    except InvalidUsage as error:
        raise InvalidUsage(f"{fields.where}: {error}") from None
    op = GraphOp(
        fields.take("name", str),
        timing.minimum_s,
        fields.names("inputs"),
        fields.names("reads"),
        fields.names("produces"),
        fields.take("resource", str),
        fields.choice("phase", get_args(Phase)),
    )
    fields.end()
    return op, timing


def _link(content: Any) -> MeasuredLink:
    fields = Fields(content, '"link"')
    ranks, backend = fields.take("ranks", int), fields.take("backend", str)
    numbers = [fields.take(key, float) for key in ("latency_s", "slice_cost_s", "seconds_per_byte")]
    fields.end()
    if ranks < 1 or not all(math.isfinite(x) and x >= 0 for x in numbers):
        raise InvalidUsage(
            f'"link" has {ranks} ranks and {numbers}; expected 1 or more, and times not negative'
        )
    return MeasuredLink(LinkModel(*numbers), ranks, backend)


def unique(names: Sequence[str]) -> list[str]:
    """The same names, with a number appended to repeated ones."""
    seen: Counter[str] = Counter()
    numbered = []
    for name in names:
        seen[name] += 1
        numbered.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return numbered
