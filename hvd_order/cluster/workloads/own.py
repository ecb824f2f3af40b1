"""The project's own table of jobs. A user with four machines may write it by hand:

    name,arrival_s,workers,duration_s,worker
    resnet,0,4,3600,gpu:1 cpu:4
    bert,600,8,7200,gpu:1 cpu:4

Columns, in any order; those that are not needed may be missing or empty:

| column | meaning | without it |
| --- | --- | --- |
| name | of the job; no other has it | needed |
| workers | that its user asks for | needed |
| arrival_s | when it is submitted, seconds | 0 |
| duration_s | how long it takes alone with so many workers | ``samples`` and ``speed`` |
| samples | to train, of all epochs | seconds of workers |
| speed | samples/s alone, by workers: ``1:100 2:190 4:350`` | from ``duration_s`` |
| speed_apart | the same with the workers on several machines | as ``speed`` |
| profile | of one worker, a file beside the table: speeds are predicted | ``speed`` |
| worker_batch | samples of the profiled step | 1 |
| compute_s, gradient_mb | of a worker's step: computes, then sums (``--links``) | as profiled |
| mode | of the prediction: allreduce, sync, async | allreduce, with servers sync |
| network_gbit | link of a worker to other machines, Gbit/s | needed with ``profile`` |
| inside_gbit | link of a worker within its machine | 10 times ``network_gbit`` |
| least, most | workers that it can run with | 1, ``workers`` |
| worker | what a worker takes: ``gpu:1 cpu:4 memory_gb:16`` | ``gpu:1`` |
| server | what a parameter server takes | nothing |
| workers_per_server | workers that share a server | no servers |
| batch, most_batch | samples of a step, and the most that training stands | 1, ``batch`` |
| noise_scale | gradient noise scale, samples | samples are worth the same in any batch |
| epoch_samples | samples of an epoch | infinite |
| value | worth of its completion | 1 |
| due_s, slope | half of it is lost ``due_s`` after the arrival; slope per second | lost never |
| model | what it trains, for reports | empty |
| command | what ``hvd-order cluster serve`` runs; ``run`` simulates without it | empty |

Speeds between two numbers of workers lie on a straight line, below the smallest they go down in
proportion, and beyond the largest they stay (``TableSpeed``). So a job of known duration is slower
with fewer workers than asked for, and no faster with more.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping

from hvd_order.base.errors import InvalidUsage
from hvd_order.base.tables import Path, TableRow, read_lines
from hvd_order.cluster.model.job import ClusterJob
from hvd_order.cluster.model.speed import TableSpeed
from hvd_order.cluster.model.utility import Constant, Sigmoid, Utility
from hvd_order.cluster.workloads.numbered import Numbered
from hvd_order.cluster.workloads.profiled import MODES, profiled_graph, profiled_speed
from hvd_order.planning.graph.graph import Graph
from hvd_order.planning.graph.synthetic import chain

__all__ = ["COLUMNS", "COMMAND", "amounts_of", "own_job", "read_own"]

COMMAND = "command"
NEEDED = ("name", "workers")
COLUMNS = (
    *NEEDED, "arrival_s", "duration_s", "samples", "speed", "speed_apart", "profile",
    "worker_batch", "compute_s", "gradient_mb", "mode", "network_gbit", "inside_gbit", "least",
    "most", "worker", "server", "workers_per_server", "batch", "most_batch", "noise_scale",
    "epoch_samples", "value", "due_s", "slope", "model", COMMAND,
)  # fmt: skip


def amounts_of(text: str, separator: str | None = None) -> dict[str, float]:
    """Reads ``gpu:1 cpu:4``.

    Raises:
        InvalidUsage: a part is no name and number, or a name occurs twice.
    """
    found: dict[str, float] = {}
    for part in text.split(separator):
        name, colon, amount = part.strip().partition(":")
        try:
            value = float(amount)
        except ValueError:
            value = math.nan
        if not name or not colon or not 0 <= value < math.inf:
            raise InvalidUsage(f"{part.strip()!r} in {text!r}; expected a name and a number of at "
                               "least 0, such as gpu:1")  # fmt: skip
        if name in found:
            raise InvalidUsage(f"{name!r} twice in {text!r}")
        found[name] = value
    return found


def read_own(path: Path) -> Numbered:
    """Reads the jobs.

    Raises:
        InvalidUsage: a line is no job, or a column is unknown.
    """
    for line in read_lines(path, NEEDED):
        if unknown := [column for column in line.fields if column not in COLUMNS]:
            raise line.wrong(f"unknown column {unknown[0]!r}; known are {', '.join(COLUMNS)}")
        yield line, own_job(line)


def own_job(line: TableRow) -> ClusterJob:
    """The job of a line.

    Raises:
        InvalidUsage: it is none.
    """
    try:
        return _job(_Optional(line))
    except InvalidUsage as error:
        if str(error).startswith(line.path):
            raise
        raise line.wrong(str(error)) from None


class _Optional:
    """A line whose empty columns are None."""

    def __init__(self, line: TableRow) -> None:
        self.line = line

    def has(self, column: str) -> bool:
        return bool(self.line.fields.get(column))

    def number(self, column: str, *, above: float | None = None) -> float | None:
        return self.line.number_of(column, above=above) if self.has(column) else None

    def whole(self, column: str) -> int | None:
        return self.line.whole(column, 1) if self.has(column) else None

    def amounts(self, column: str, without: Mapping[str, float]) -> Mapping[str, float]:
        return amounts_of(self.line.fields[column]) if self.has(column) else without

    def speeds(self, column: str) -> dict[int, float] | None:
        if not self.has(column):
            return None
        table = self.amounts(column, {})
        if any(not count.isdecimal() or int(count) < 1 for count in table):
            raise self.line.wrong(f"{column} is {self.line.fields[column]!r}; expected samples/s "
                                  "by workers, such as 1:100 2:190")  # fmt: skip
        return {int(count): rate for count, rate in table.items()}


def _job(line: _Optional) -> ClusterJob:
    workers = line.line.whole("workers", 1)
    duration_s = line.number("duration_s", above=0)
    samples = line.number("samples", above=0)
    speeds = line.speeds("speed")
    given = [c for c in ("duration_s", "speed", "profile") if line.has(c)]
    if len(given) > 1:
        raise line.line.wrong(f"both {given[0]} and {given[1]}; expected one of them")
    if duration_s is not None:
        samples = samples or duration_s * workers
        speeds = {workers: samples / duration_s}
    if samples is None or (speeds is None and not line.has("profile")):
        raise line.line.wrong("no duration_s; expected it, or samples and speed, or samples and "
                              "profile")  # fmt: skip
    batch = line.whole("batch") or 1
    return ClusterJob(
        line.line.text("name"),
        line.number("arrival_s") or 0.0,
        samples,
        _predicted(line) if speeds is None else TableSpeed(speeds, line.speeds("speed_apart")),
        line.amounts("worker", {"gpu": 1.0}),
        line.amounts("server", {}),
        line.whole("workers_per_server"),
        requested=workers,
        least=line.whole("least") or 1,
        most=line.whole("most") or workers,
        batch=batch,
        most_batch=line.whole("most_batch"),
        noise_scale=line.number("noise_scale"),
        epoch_samples=line.number("epoch_samples", above=0) or math.inf,
        utility=_utility(line),
        model=line.line.fields.get("model", ""),
        graph=_graph(line),
    )


def _graph(line: _Optional) -> Graph | None:
    """A worker's step: the profiled one, or one that sums all gradients when it has computed."""
    compute_s, megabytes = line.number("compute_s", above=0), line.number("gradient_mb", above=0)
    if (compute_s is None) != (megabytes is None):
        raise line.line.wrong("compute_s and gradient_mb belong together; expected both or none")
    if compute_s is None or megabytes is None:
        return profiled_graph(_profile(line)) if line.has("profile") else None
    if line.has("profile"):
        raise line.line.wrong("both compute_s and profile; expected one of them")
    return chain([0.0], [compute_s], [round(1e6 * megabytes)])


def _profile(line: _Optional) -> pathlib.Path:
    return pathlib.Path(line.line.path).parent / line.line.fields["profile"]


def _predicted(line: _Optional) -> TableSpeed:
    """Speeds from the profile that the line names."""
    per_server = line.whole("workers_per_server")
    mode = line.line.fields.get("mode") or ("allreduce" if per_server is None else "sync")
    if mode not in MODES:
        raise line.line.wrong(f"mode is {mode!r}; expected one of {', '.join(MODES)}")
    network_gbit = line.number("network_gbit", above=0)
    if network_gbit is None:
        raise line.line.wrong("a profile without network_gbit; expected a worker's link")
    return profiled_speed(
        _profile(line),
        line.whole("worker_batch") or 1,
        line.whole("most") or line.line.whole("workers", 1),
        mode,
        per_server,
        network_gbit,
        line.number("inside_gbit", above=0),
    )


def _utility(line: _Optional) -> Utility:
    value, due_s, slope = line.number("value"), line.number("due_s"), line.number("slope")
    if (due_s is None) != (slope is None):
        raise line.line.wrong("due_s and slope belong together; expected both or none")
    worth = 1.0 if value is None else value
    return Constant(worth) if due_s is None or slope is None else Sigmoid(worth, slope, due_s)
