"""One exchange of the ranks about their last steps, on the thread of the collective queue."""

from __future__ import annotations

import logging
import math
import socket
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hvd_order._native import _torch as native
from hvd_order.base.account.clock_offset import ClockOffset
from hvd_order.base.account.exposed import (
    Exposed,
    SlicesOfStep,
    WaitedSlices,
    explain,
    late_layer,
)
from hvd_order.base.account.replay import saved_ns
from hvd_order.base.account.slow_ranks import RankRow, SlowRank, Verdict
from hvd_order.base.account.step_parts import StepMarks, StepParts, overlap, parts_of
from hvd_order.base.account.step_stats import StepStats
from hvd_order.engine.account import links, numbers, ready_times
from hvd_order.engine.account.noted_step import NotedStep
from hvd_order.engine.account.reports import StepReport, publish
from hvd_order.engine.account.told import Told
from hvd_order.engine.account.waited_slices import waited_slices
from hvd_order.engine.engine_host import EngineHost
from hvd_order.engine.host_levels import hosts_of
from hvd_order.engine.job import group_collectives

__all__: list[str] = []

_log = logging.getLogger("hvd_order")
T = TypeVar("T")

_USUAL_PAUSE = 10  # steps
_LEAST_S = 0.5  # between exchanges: short steps are seen less often
_LONGEST_PAUSE = 1000
_MUCH = 0.05  # of a step; a replay of what is less would cost more than it tells


@dataclass(frozen=True)
class _Explained:
    marks: StepMarks
    parts: StepParts
    exposed: Exposed
    times: SlicesOfStep
    slices: WaitedSlices


class RankComparison:
    """What the exchanges of one optimizer have found.

    Thread safety: `compare` runs on one thread; `stats` and `pause` may be read on any.

    Attributes:
        stats: of this rank.
        pause: steps between two exchanges; the same on all ranks.
    """

    def __init__(self, host: EngineHost, key: str) -> None:
        """Starts without an exchange.

        Args:
            key: of the optimizer.
        """
        self._host = host
        self._key = key
        self.stats = StepStats()
        self.pause = _USUAL_PAUSE
        self._offset: ClockOffset | None = None
        self._hosts = [0] * host.size
        self._host_names = [socket.gethostname()] * host.size
        self._rates: links.LinkRates | None = None
        self._slow = SlowRank()
        self._told = Told(host.rank == 0, host.ranks, host.job.config.report)
        self._waited: tuple[native.SliceLayout, WaitedSlices] | None = None
        self._steps_before = 0
        self._has_failed = False

    def compare(
        self,
        steps: Sequence[NotedStep],
        queued_s: float,
        about: StepStats,
        group: dist.ProcessGroup | None,
    ) -> None:
        """Explains this rank's steps, and compares them with those of the other ranks. Collective.

        Args:
            steps: the same steps on all ranks.
            queued_s: by step, that the training thread waited for a core.
            about: what is known without an exchange.
            group: of all ranks; None: this rank is not compared.
        """
        if group is None:
            alone = self._guarded(lambda: self._look(steps, None, queued_s, about))
            if alone is not None:
                _, _, mine = alone
                self.pause = _pause(mine.step_s)
                self._publish(mine, [mine])
            return
        if self._rates is None:
            self._find_hosts(group)
        ready = [at for step in steps for at in _ready(step)]
        # The count tells apart ranks with other numbers of steps, too.
        self._offset, alike = ready_times.compare_clocks(
            group, self._offset, len(ready) * _LONGEST_PAUSE + len(steps)
        )
        if not alike and not self._has_failed:
            self._has_failed = True
            _log.warning("the ranks noted different steps, which have no account")
        if not alike or not steps:
            return
        found = ready_times.last_ready(ready, self._offset, self._host.rank, group)
        local = self._guarded(lambda: self._look(steps, found, queued_s, about))
        told = torch.zeros(numbers.count(len(steps)), dtype=torch.float64)
        if local is not None:
            _, row, mine = local
            told = torch.tensor(numbers.packed(row, mine), dtype=torch.float64)
        everyone = group_collectives.all_gather(told, group)
        # Whatever goes wrong on this rank: all ranks must have the same.
        self.pause = _pause(median(numbers.step_s(values.tolist()) for values in everyone))
        if local is not None:
            self._guarded(lambda: self._judge(everyone, *local))

    def _guarded(self, work: Callable[[], T]) -> T | None:
        """Does what other ranks do not take part in. A fault of it must not end the training: it is
        told once.
        """
        try:
            return work()
        except Exception as error:
            if not self._has_failed:
                self._has_failed = True
                _log.warning(
                    "rank %d has no account of some steps: %r", self._host.job.rank, error,
                    exc_info=error,
                )  # fmt: skip
            return None

    # ---- this rank ----------------------------------------------------------------------------

    def _find_hosts(self, group: dist.ProcessGroup) -> None:
        job = self._host.job
        own_addresses = self._guarded(links.own_addresses) or []
        mine = (socket.gethostname(), job.local_rank, job.local_size, own_addresses)
        everyone = group_collectives.gather_objects(mine, group, "hosts")
        self._hosts = hosts_of([(name, rank, size) for name, rank, size, _ in everyone])
        self._host_names = [name for name, _, _, _ in everyone]
        own = self._hosts[self._host.rank]
        host_of: dict[str, int] = {}
        for (_, _, _, addresses), host in zip(everyone, self._hosts, strict=True):
            for address in addresses:
                # One that several hosts have is none by which to know them.
                host_of[address] = host if host_of.get(address, host) == host else -1
        self._rates = links.LinkRates(host_of, own)

    def _look(
        self,
        steps: Sequence[NotedStep],
        ready: tuple[list[int], list[int], list[int]] | None,
        queued_s: float,
        about: StepStats,
    ) -> tuple[list[_Explained], RankRow, StepStats]:
        explained = []
        at = 0
        for step in steps:
            to = at + step.slices_count
            part = None if ready is None else (ready[0][at:to], ready[1][at:to], ready[2][at:to])
            explained.append(self._explained(step, part))
            at = to
        sent = {} if self._rates is None else self._rates.sent()
        passed = about.steps - self._steps_before
        self._steps_before = about.steps
        links_of = links.slowest(sent, passed * steps[-1].wire_bytes)
        row = self._row(explained, queued_s, links_of)
        return explained, row, self._stats_of(steps, explained, about)

    def _explained(
        self, step: NotedStep, ready: tuple[list[int], list[int], list[int]] | None
    ) -> _Explained:
        own = array("q", step.slices or bytes(24 * step.slices_count))
        mine = list(own[0::3])
        last, place, second = ready or (mine, [self._host.rank] * len(mine), mine)
        times = SlicesOfStep(mine, own[1::3], own[2::3], last, place, second)
        slices = self._waited_of(step.layout)
        exposed = explain(step.times.waits, times, slices)
        return _Explained(step.times, parts_of(step.times), exposed, times, slices)

    def _waited_of(self, layout: native.SliceLayout) -> WaitedSlices:
        if self._waited is None or self._waited[0] is not layout:
            self._waited = layout, waited_slices(layout)
        return self._waited[1]

    def _stats_of(
        self, steps: Sequence[NotedStep], explained: Sequence[_Explained], about: StepStats
    ) -> StepStats:
        # Means over the same steps, so that the parts add up to the step; neither the shortest nor
        # the longest ones.
        by_length = sorted(explained, key=lambda each: each.parts.step_s)
        outside = len(by_length) // 4
        middle = by_length[outside : len(by_length) - outside]

        def usual(value: str) -> float:
            return fmean(getattr(each.parts, value) for each in middle)

        def exposed_s(value: str) -> float:
            return fmean(getattr(each.exposed, value) for each in middle) / 1e9

        newest = explained[-1].times
        travelled = [
            (issued, done)
            for issued, done in zip(newest.issued, newest.done, strict=True)
            if issued and done > issued
        ]
        return replace(
            about,
            step_s=usual("step_s"),
            compute_s=usual("compute_s"),
            late_s=exposed_s("late"),
            queue_s=exposed_s("queue"),
            transfer_s=exposed_s("transfer"),
            inversion_s=exposed_s("inversion"),
            update_s=usual("update_s"),
            host_s=usual("host_s"),
            loader_s=usual("loader_s"),
            overlap=overlap(travelled, [(a, b) for a, b, _ in steps[-1].times.waits]),
            wire_bytes=steps[-1].wire_bytes,
            clock_error_s=0.0 if self._offset is None else self._offset.error_ns / 1e9,
        )

    def _row(
        self, explained: Sequence[_Explained], queued_s: float, links_of: tuple[int, float]
    ) -> RankRow:
        latest = [
            max(each.exposed.late_of.items(), key=_second, default=(-1, 0)) for each in explained
        ]
        parts = [each.parts for each in explained]
        seeing = [each for each in parts if each.has_loader]
        sees_loader = 2 * len(seeing) >= len(parts)
        ahead = seeing if sees_loader else parts  # else what is before the pass belongs to it
        own = self._host.rank
        newest = explained[-1].times
        late_slice = None
        if newest.last.count(own) * 2 > len(newest.last):
            late_slice = late_layer(newest.ready, newest.ready_second)
        sends_to, sends_per_s = links_of
        return RankRow(
            step_s=[each.step_s for each in parts],
            latest=[place for place, _ in latest],
            latest_s=[late / 1e9 for _, late in latest],
            saved_s=[
                self._without_s(each, place, late / 1e9)
                for each, (place, late) in zip(explained, latest, strict=True)
            ],
            parts_s={
                "backward pass": median(each.backward_s for each in parts),
                "host": median(each.rest_s for each in parts),
                "update": median(each.update_s for each in parts),
                "loader": median(each.loader_s for each in ahead) if sees_loader else 0.0,
                "forward pass": median(
                    each.forward_s + (0.0 if sees_loader else each.loader_s) for each in ahead
                ),
            },
            link_s=median(each.exposed.queue + each.exposed.transfer for each in explained) / 1e9,
            run_queue_s=queued_s,
            clock_error_s=0.0 if self._offset is None else self._offset.error_ns / 1e9,
            late_slice=-1 if late_slice is None else late_slice,
            sends_to=sends_to,
            sends_per_s=sends_per_s,
        )

    def _saved_s(self, each: _Explained, ready: Sequence[int], duration: float = 1.0) -> float:
        by_need = self._host.slice_settings.policy == "priority"
        saved = saved_ns(each.marks, each.times, each.slices, ready, by_need, duration)
        return max(saved, 0.0) / 1e9

    def _without_s(self, each: _Explained, place: int, late_s: float) -> float:
        """By how much the step would be shorter if the rank at ``place`` were not the last."""
        if late_s < _MUCH * each.parts.step_s:
            return late_s
        times = each.times
        columns = zip(times.ready_last, times.last, times.ready_second, strict=True)
        ready = [second if rank == place else last for last, rank, second in columns]
        return self._saved_s(each, ready)

    def _with_faster_link(self, slow: Verdict, explained: Sequence[_Explained]) -> Verdict:
        """The verdict about a link, with what this rank's steps would gain at the others' rate."""
        saved_s = median(
            self._saved_s(each, each.times.ready_last, slow.of_usual) for each in explained
        )
        return replace(slow, delay_s=min(saved_s, slow.step_s))

    # ---- all ranks ----------------------------------------------------------------------------

    def _judge(
        self,
        told: Sequence[torch.Tensor],
        explained: Sequence[_Explained],
        row: RankRow,
        mine: StepStats,
    ) -> None:
        everyone = [numbers.unpacked(values.tolist(), len(row.step_s), mine) for values in told]
        if not all(stats.step_s > 0 for _, stats in everyone):
            return  # a rank has no account
        news = self._slow.seen([row for row, _ in everyone], self._hosts)
        slow = self._slow.present
        if slow is not None and slow.host >= 0:
            slow = self._with_faster_link(slow, explained)
            news = [(slow if begins else each, begins) for each, begins in news]
        error_s = max(each.clock_error_s for each, _ in everyone)
        found: dict[str, Any] = {"clock_error_s": error_s}
        if slow is not None:
            found |= {
                "slow_rank": self._host.ranks[slow.place],
                "slow_cause": slow.cause,
                "slow_detail": self._detail(slow.late_slice, slow.host),
                "slow_s": slow.delay_s,
                "without_s": slow.step_s - slow.delay_s,
            }
        all_stats = [replace(stats, **found) for _, stats in everyone]
        self._publish(replace(mine, **found), all_stats)
        for each, begins in news:
            detail = self._detail(each.late_slice, each.host)
            self._told.slow(each, begins, self._host_names[each.place], detail, error_s)

    def _detail(self, late_slice: int, host: int) -> str:
        """The layer from which on a rank is late, or the host of a link."""
        if host >= 0:
            return self._host_names[self._hosts.index(host)]
        names = () if self._waited is None else self._waited[1].names
        return names[late_slice] if 0 <= late_slice < len(names) else ""

    def _publish(self, mine: StepStats, everyone: Sequence[StepStats]) -> None:
        self.stats = mine
        ranks = self._host.ranks if len(everyone) > 1 else [self._host.job.rank]
        names = self._host_names if len(everyone) > 1 else [socket.gethostname()]
        publish(StepReport(self._key, mine, everyone, ranks, names))
        self._told.stats(mine, everyone)


def _pause(step_s: float) -> int:
    steps = math.ceil(_LEAST_S / step_s) if step_s > 0 else 0
    return min(max(steps, _USUAL_PAUSE), _LONGEST_PAUSE)


def _ready(step: NotedStep) -> Sequence[int]:
    return array("q", step.slices or bytes(24 * step.slices_count))[0::3]


def _second(item: tuple[int, int]) -> int:
    return item[1]
