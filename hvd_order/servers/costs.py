"""What parameter servers cost, from the times of a job: the link, updates, and both ends' work."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from hvd_order.base.errors import InvalidUsage
from hvd_order.base.link.busy_union import LinkUse, ReceivedTimes, link_use
from hvd_order.base.link.link_fit import fit_line

__all__ = [
    "Cost",
    "ServerCosts",
    "ServerTimes",
    "StrategySteps",
    "UpdateTimes",
    "cost_of",
    "server_costs",
]

_FEW = 5  # samples of a size; fewer do not count where other sizes have enough
_APART = 2.0  # least ratio of two sizes between which a line is drawn
_LEAST_S = 1e-9


@dataclass(frozen=True)
class UpdateTimes:
    """An update of a slice on a server, or its sum; times as of `ReceivedTimes`."""

    size_bytes: int
    begin_ns: int
    end_ns: int
    thread: int = 0


@dataclass(frozen=True)
class ServerTimes:
    """What one worker and one server recorded.

    Attributes:
        pushes: of this worker, as the server received them.
        updates: of the server.
        answers: of the server, as the worker received them.
        here: the server is on the worker's host, so both have one clock.
    """

    pushes: Sequence[ReceivedTimes]
    updates: Sequence[UpdateTimes]
    answers: Sequence[ReceivedTimes]
    here: bool


@dataclass(frozen=True)
class Cost:
    """Time of one piece of work on a slice of n bytes: ``seconds + n * seconds_per_byte``.

    Attributes:
        apart: sizes differed enough to tell both parts apart. Otherwise all time counts for bytes.
    """

    seconds: float
    seconds_per_byte: float
    apart: bool


@dataclass(frozen=True)
class StrategySteps:
    """What is known of the steps of TensorFlow's ParameterServerStrategy alone.

    Attributes:
        fetch_orders: of each measured step, numbers of the parameters in the order in which their
            values came to the worker; it changes from step to step.
        between_s: median time from the end of a step on its worker, with its updates made, until
            the worker asks for the parameters of the next one; the coordinator sends it meanwhile.
    """

    fetch_orders: tuple[tuple[int, ...], ...]
    between_s: float


@dataclass(frozen=True)
class ServerCosts:
    """What parameter servers cost one worker.

    Attributes:
        servers, workers: of the measured job.
        mode: "sync" or "async".
        updates: "server": servers update parameters; "worker": they only sum.
        push, answer: the worker's link to and from the servers.
        update: of a server, for each update of a slice, or for each sum.
        server_end: of a server's end of a connection, for each push, without the update: reading
            the frame, and handing the answer to the connection.
        worker_end: of a worker's end, for each answer: reading the frame and copying its content.
        step_s: the measured worker's steps, one after the other; empty in older files.
        strategy: None: the servers are hvd_order's. Otherwise they are TensorFlow's, ``answer``
            stands for the fetches of parameters, and the costs of both ends are not known (0).
    """

    servers: int
    workers: int
    mode: Literal["sync", "async"]
    updates: Literal["server", "worker"]
    push: LinkUse
    answer: LinkUse
    update: Cost
    server_end: Cost
    worker_end: Cost
    step_s: tuple[float, ...] = ()
    strategy: StrategySteps | None = None

    def link(self) -> tuple[float, bool] | None:
        """Bytes/s of a worker's link, and whether it is only known to be at least that.

        One link carries both directions, so a direction that tells it goes before one that says at
        least. Of two that tell it the slower one counts: pauses between transfers let the first
        bytes behind them look fast. Of two that say at least, the faster one.
        """
        ways = [way for way in (self.push, self.answer) if way.bytes_per_s is not None]
        certain = [way.bytes_per_s or 0.0 for way in ways if not way.at_least]
        if certain:
            return min(certain), False
        return max(((way.bytes_per_s or 0.0, True) for way in ways), default=None)


def cost_of(samples: Iterable[tuple[int, float]]) -> Cost:
    """The cost of a piece of work from (bytes, seconds) of many.

    The median of each size counts, because other load on a machine delays a few of them for long.

    Raises:
        InvalidUsage: there is no sample.
    """
    by_size: dict[int, list[float]] = defaultdict(list)
    for size, seconds in samples:
        by_size[size].append(seconds)
    if not by_size:
        raise InvalidUsage("no work was recorded")
    enough = {size: each for size, each in by_size.items() if len(each) >= _FEW} or by_size
    points = {size: max(statistics.median(each), _LEAST_S) for size, each in enough.items()}
    if max(points) < _APART * min(points):
        total = sum(points[size] * len(enough[size]) for size in points)
        return Cost(0.0, total / sum(size * len(enough[size]) for size in points), False)
    return Cost(*fit_line(list(points.items())), True)


def server_costs(
    times: Sequence[ServerTimes],
    workers: int,
    mode: Literal["sync", "async"],
    updates: Literal["server", "worker"],
    step_s: Sequence[float] = (),
) -> ServerCosts:
    """Sums up what one worker and each server recorded.

    Args:
        workers: of the job.
        mode, updates, step_s: as of `ServerCosts`.

    Raises:
        InvalidUsage: nothing was exchanged.
    """
    if not any(one.pushes and one.updates and one.answers for one in times):
        raise InvalidUsage(
            "no slice went to a server and back while it was recorded; the script must exchange "
            "gradients, by hvd_order's DistributedOptimizer"
        )
    one_clock = all(one.here for one in times)
    return ServerCosts(
        len(times),
        workers,
        mode,
        updates,
        link_use([one.pushes for one in times], one_clock),
        link_use([one.answers for one in times], True),
        cost_of((u.size_bytes, (u.end_ns - u.begin_ns) / 1e9) for t in times for u in t.updates),
        cost_of(sample for one in times for sample in _without_updates(one)),
        cost_of((a.size_bytes, (a.handled_ns - a.came_ns) / 1e9) for t in times for a in t.answers),
        tuple(step_s),
    )


def _without_updates(times: ServerTimes) -> Iterable[tuple[int, float]]:
    """Bytes and seconds of the server's work on each push, less the updates that it made due."""
    updates: dict[int, list[UpdateTimes]] = defaultdict(list)
    for update in times.updates:
        updates[update.thread].append(update)
    for of_thread in updates.values():
        of_thread.sort(key=lambda update: update.begin_ns)
    begins = {thread: [u.begin_ns for u in each] for thread, each in updates.items()}
    for push in times.pushes:
        mine = updates.get(push.thread, [])
        first = bisect_left(begins.get(push.thread, []), push.came_ns)
        last = bisect_left(begins.get(push.thread, []), push.handled_ns)
        inside = sum(update.end_ns - update.begin_ns for update in mine[first:last])
        yield push.size_bytes, (push.handled_ns - push.came_ns - inside) / 1e9
