"""In which order updates of asynchronous workers are sent to a server, and which through a helper.

An update is *late* by the number of updates that the server has applied since its worker read the
parameters; convergence suffers from large and uneven delays. Here they are bounded: what cannot be
applied in time is not sent at all, and of the rest the shortest goes first.

Source:
    Viswanathan, Balasubramanian, Akella, "MLfabric: A parallel network fabric for faster
    distributed machine learning" (arXiv 1907.00434). Its text was not at hand: this is a
    reconstruction from its summary; guard and proofs are ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from hvd_order import _core
from hvd_order.errors import InvalidUsage

__all__ = [
    "AggregationPlan",
    "Group",
    "Rates",
    "Update",
    "aggregation_plan",
    "delay_bounded_order",
]


@dataclass(frozen=True)
class Update:
    """A worker asks to send an update.

    Attributes:
        read_version: of the parameters that it was computed with.
    """

    worker: int
    read_version: int
    size_bytes: int


@dataclass(frozen=True)
class Rates:
    """Bytes a second of everybody's link, in either direction; positive.

    Attributes:
        helpers: by number.
        workers: by number; those that are not named are no slower than whom they send to.
    """

    server: float
    helpers: Mapping[int, float] = field(default_factory=dict)
    workers: Mapping[int, float] = field(default_factory=dict)

    def to_server_s(self, update: Update) -> float:
        """How long an update takes straight to the server, alone."""
        return update.size_bytes / min(self.server, self.workers.get(update.worker, math.inf))

    def to_helper_s(self, update: Update, helper: int) -> float:
        """How long it takes to a helper, alone."""
        rate = min(self.helpers[helper], self.workers.get(update.worker, math.inf))
        return update.size_bytes / rate


@dataclass(frozen=True)
class Group:
    """Updates that a helper adds up and sends as one, as large as the largest of them."""

    helper: int
    members: tuple[Update, ...]


@dataclass(frozen=True)
class AggregationPlan:
    """Who sends what where.

    Attributes:
        direct: goes straight to the server, in this order, first.
        groups: follow, in this order; helpers receive theirs meanwhile.
        makespan_s: until the server has everything.
        direct_s: the same if all went straight to it.
    """

    direct: tuple[Update, ...]
    groups: tuple[Group, ...]
    makespan_s: float
    direct_s: float


def delay_bounded_order(
    updates: Sequence[Update],
    version: int,
    delay_bound: int,
    transfer_s: Callable[[Update], float],
) -> tuple[list[Update], list[Update]]:
    """Shortest first, as far as every update can still be applied within the bound.

    The rule by which servers admit pushes (csrc/server/delay_order.h says how it works).

    Args:
        updates: that wait.
        version: of the server's parameters; one more with each update applied.
        delay_bound: the greatest delay that an update may have when it is applied.
        transfer_s: how long the update is on the way to the server, if alone; for example
            :meth:`Rates.to_server_s`.

    Returns:
        The updates in the order in which they should be sent and applied, and those to drop, in the
        order given.

    Raises:
        InvalidUsage: the bound is negative, or an update was computed with a version to come.
    """
    if delay_bound < 0:
        raise InvalidUsage(f"no update has a delay of {delay_bound} or less; the least is 0")
    for update in updates:
        if update.read_version > version:
            raise InvalidUsage(
                f"worker {update.worker} read version {update.read_version}, "
                f"but the server is at {version}; give the version that it has now"
            )
    waiting = [
        (delay_bound - (version - update.read_version), transfer_s(update)) for update in updates
    ]
    order, late = _core.delay_bounded_order(waiting)
    return [updates[i] for i in order], [updates[i] for i in late]


def aggregation_plan(
    updates: Sequence[Update], helpers: Sequence[int], rates: Rates
) -> AggregationPlan:
    """Lets helpers add up the later updates while the server receives the earlier ones.

    Some first updates go straight to the server. The rest is cut into runs, each for a helper after
    that of the run before. The server receives in the given order; a helper receives its run
    meanwhile and sends the sum as soon as the server's link is free. When the server has the first
    j updates with the first h helpers depends on nothing but when it had the first i with fewer,
    and earlier is never worse: so the best cut of all is found, and it is never slower than none.

    Nobody's delay grows: a group is applied no later in the order than each member would be alone,
    counts as many versions as it has members, and is as old as its oldest.

    Args:
        updates: in the order in which they should be applied.
        helpers: in the order in which they are used; each once.
        rates: of all links. A link carries one transfer at a time.

    Returns:
        The soonest finished plan; O(n^2) for each helper.

    Raises:
        InvalidUsage: a helper is named twice or has no rate.

    Source:
        MLfabric as in the module's text: who goes where. There the runs are as long as a helper
        can receive before the server is free, which can take half as long again.
    """
    if len(set(helpers)) != len(helpers) or not set(helpers) <= set(rates.helpers):
        raise InvalidUsage(
            f"helpers {list(helpers)} have to be named once each, and have rates; there are rates "
            f"of {sorted(rates.helpers)}"
        )
    had_s = list(accumulate(map(rates.to_server_s, updates), initial=0.0))  # the first j
    direct_s = had_s[-1]
    begins: list[list[int]] = []  # of the helper's run that ends before j; j if it has none
    for helper in helpers:
        had_s, begin = _with_helper(updates, helper, rates, had_s)
        begins.append(begin)
    groups: list[Group] = []
    end = len(updates)
    for helper, begin in zip(reversed(helpers), reversed(begins), strict=True):
        if begin[end] < end:
            groups.append(Group(helper, tuple(updates[begin[end] : end])))
            end = begin[end]
    return AggregationPlan(tuple(updates[:end]), tuple(reversed(groups)), had_s[-1], direct_s)


def _with_helper(
    updates: Sequence[Update], helper: int, rates: Rates, had_s: Sequence[float]
) -> tuple[list[float], list[int]]:
    """When the server has the first j updates, by j, if the last of them may go by this helper.

    Args:
        had_s: the same without it.

    Returns:
        Also where its run begins; at j if it has none.
    """
    better_s, begin = list(had_s), list(range(len(had_s)))
    for end in range(1, len(had_s)):
        ready_s, largest = 0.0, 0
        for first in range(end - 1, -1, -1):
            ready_s += rates.to_helper_s(updates[first], helper)
            largest = max(largest, updates[first].size_bytes)
            sum_s = largest / min(rates.server, rates.helpers[helper])
            end_s = max(had_s[first], ready_s) + sum_s
            if end_s < better_s[end]:
                better_s[end], begin[end] = end_s, first
    return better_s, begin
