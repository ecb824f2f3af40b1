"""Simulates jobs whose transfers share links."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from hvd_order.base.errors import InvalidUsage
from hvd_order.cluster.links.fairness import shares
from hvd_order.cluster.links.jobs import LinkJob, LinkSharing, LinkTrace
from hvd_order.cluster.links.step import LinkStep

__all__ = ["alone_s", "simulate_shared"]


def simulate_shared(
    jobs: Sequence[LinkJob],
    capacity: Sequence[float],
    until_s: float,
    sharing: LinkSharing | None = None,
) -> list[LinkTrace]:
    """Runs all jobs until a time.

    A job computes its ops one after the other. It sends one transfer at a time, the first one in
    its order that is ready, and goes over to another at once when that one is ahead: slices are
    infinitely small, and transfers cost bytes alone, no latency.

    Args:
        capacity: bytes a second of each link.
        sharing: None: max-min fair, all begin at 0.

    Raises:
        InvalidUsage: a job uses a link that is not there, or there is no end.
    """
    if not 0 < until_s < math.inf:
        raise InvalidUsage(f"a simulation until {until_s} s; expected a time of more than 0")
    for job in jobs:
        for link, load in job.load.items():
            if not 0 <= link < len(capacity) or not load > 0 or not capacity[link] > 0:
                raise InvalidUsage(
                    f"job {job.name!r} puts {load} bytes a byte on link {link}; expected more than "
                    f"0, on one of {len(capacity)} links with a capacity of more than 0"
                )
    return _Shared(jobs, capacity, until_s, sharing or LinkSharing.fair(len(jobs))).run()


_ITERATIONS = 12
_NOTHING = 1e-9  # of a transfer: what rounding leaves of it when another job takes the link


@lru_cache(maxsize=4096)
def alone_s(step: LinkStep, s_per_byte: float) -> float:
    """Mean iteration of a job that shares no link.

    Args:
        s_per_byte: load of its narrowest link over that link's capacity.
    """
    if s_per_byte == 0:
        return step.compute_s
    job = LinkJob("", step, {0: s_per_byte})
    until_s = _ITERATIONS * (step.compute_s + job.link_s([1.0]))
    return simulate_shared([job], [1.0], until_s)[0].iteration_s


@dataclass(eq=False)
class _RunningJob:
    """A job in a simulation. A transfer's key is its iteration and its place in the step."""

    number: int
    job: LinkJob
    trace: LinkTrace
    missing: list[int]  # by op: transfers of the iteration before that it waits for
    after: list[list[int]]  # by op: transfers that it makes ready
    begin_s: float
    every_s: float
    iteration: int = 0
    op: int = 0
    computes: bool = False
    event_s: float = math.inf  # end of its op, or the time before which it may not begin
    queue: list[tuple[int, int]] = field(default_factory=list)  # heap of the transfers to send
    left: dict[tuple[int, int], float] = field(default_factory=dict)
    sends: tuple[int, int] | None = None
    rate: float = 0.0
    since_s: float = 0.0
    sent_s: float = math.inf  # when its transfer ends at this rate


class _Shared:
    def __init__(
        self,
        jobs: Sequence[LinkJob],
        capacity: Sequence[float],
        until_s: float,
        sharing: LinkSharing,
    ) -> None:
        self._capacity = capacity
        self._until_s = until_s
        self._levels = sharing.levels
        self._rates: dict[int, list[float]] = {}  # by the set of jobs that send
        self._sending = 0
        self._jobs: list[_RunningJob] = []
        for job, begin_s, every_s in zip(jobs, sharing.begin_s, sharing.every_s, strict=True):
            after: list[list[int]] = [[] for _ in job.step.ops_s]
            for i, one in enumerate(job.step.transfers):
                if job.load and one.size_bytes > 0:
                    after[one.after].append(i)
            self._jobs.append(
                _RunningJob(
                    number=len(self._jobs),
                    job=job,
                    trace=LinkTrace(until_s),
                    missing=[0] * len(after),
                    after=after,
                    begin_s=begin_s,
                    every_s=every_s,
                    event_s=begin_s,
                )
            )
        self._due_s = [one.event_s for one in self._jobs]

    def run(self) -> list[LinkTrace]:
        due_s = self._due_s
        while True:
            now_s = min(due_s)
            if now_s >= self._until_s:
                break
            one = self._jobs[due_s.index(now_s)]
            if one.sent_s <= one.event_s:
                self._sent(one, now_s)
            elif one.computes:
                self._computed(one, now_s)
            else:
                one.event_s = math.inf
                self._compute(one, now_s)
            due_s[one.number] = min(one.event_s, one.sent_s)
        for one in self._jobs:
            self._count_sent(one, self._until_s)
            if one.computes:  # an op that goes on counts as far as it came
                one.trace.busy_s -= one.event_s - self._until_s
        return [one.trace for one in self._jobs]

    def _compute(self, one: _RunningJob, now_s: float) -> None:
        """Starts the next op if it can."""
        if one.computes or one.missing[one.op]:
            return
        if one.op == 0:
            begin_s = one.begin_s + one.iteration * one.every_s
            if now_s < begin_s:
                one.event_s = begin_s
                return
            one.trace.starts_s.append(now_s)
        seconds = one.job.step.ops_s[one.op]
        one.computes = True
        one.trace.busy_s += seconds
        one.event_s = now_s + seconds

    def _computed(self, one: _RunningJob, now_s: float) -> None:
        one.computes = False
        one.event_s = math.inf
        transfers = one.job.step.transfers
        for i in one.after[one.op]:
            key = (one.iteration, i)
            heapq.heappush(one.queue, key)
            one.left[key] = transfers[i].size_bytes
            one.missing[transfers[i].before] += 1
        if one.queue:
            self._send_first(one, now_s)
        one.op += 1
        if one.op == len(one.missing):
            one.op = 0
            one.iteration += 1
        self._compute(one, now_s)

    def _sent(self, one: _RunningJob, now_s: float) -> None:
        self._count_sent(one, now_s)
        key = heapq.heappop(one.queue)
        del one.left[key]
        one.missing[one.job.step.transfers[key[1]].before] -= 1
        if one.queue:
            self._send_first(one, now_s)
        else:
            one.sends, one.sent_s = None, math.inf
            self._changed(now_s, self._sending & ~(1 << one.number))
        self._compute(one, now_s)

    def _send_first(self, one: _RunningJob, now_s: float) -> None:
        """Goes over to the transfer that is first now."""
        first = one.queue[0]
        if one.sends == first:
            return
        began = one.sends is None
        self._count_sent(one, now_s)
        one.sends = first
        if began:
            self._changed(now_s, self._sending | 1 << one.number)
        else:
            self._predict(one)

    def _changed(self, now_s: float, sending: int) -> None:
        """Other jobs send than before: gives all of them their rates."""
        self._sending = sending
        for one, rate in zip(self._jobs, self._rates_of(sending), strict=True):
            if one.sends or one.rate:
                self._count_sent(one, now_s)
                one.rate = rate
                self._predict(one)
                self._due_s[one.number] = min(one.event_s, one.sent_s)

    def _rates_of(self, sending: int) -> list[float]:
        rates = self._rates.get(sending)
        if rates is None:
            who = [one for one in self._jobs if sending >> one.number & 1]
            loads = [one.job.load for one in who]
            levels = [self._levels[one.number] for one in who]
            rates = [0.0] * len(self._jobs)
            for one, rate in zip(who, shares(loads, levels, self._capacity), strict=True):
                rates[one.number] = rate
            self._rates[sending] = rates
        return rates

    def _count_sent(self, one: _RunningJob, now_s: float) -> None:
        """Counts what it has sent at its present rate."""
        begin_s, one.since_s = one.since_s, now_s
        if not one.rate or now_s <= begin_s:
            return
        sent = one.trace.sent
        if sent and sent[-1][1] == begin_s and sent[-1][2] == one.rate:
            sent[-1] = (sent[-1][0], now_s, one.rate)
        else:
            sent.append((begin_s, now_s, one.rate))
        if one.sends:
            left = one.left[one.sends] - one.rate * (now_s - begin_s)
            size = one.job.step.transfers[one.sends[1]].size_bytes
            one.left[one.sends] = left if left > _NOTHING * size else 0.0

    def _predict(self, one: _RunningJob) -> None:
        one.sent_s = math.inf
        if one.sends and not one.left[one.sends]:
            one.sent_s = one.since_s
        elif one.sends and one.rate > 0:
            one.sent_s = one.since_s + one.left[one.sends] / one.rate
