"""The account of one optimizer's steps: where their time goes, on all ranks.

Each rank notes the times of its own steps (the frontend's recorder). About every ten steps the
ranks exchange them, on the thread of the collective queue while the training goes on:

* the passages of three tiny all-reduces, which compare the clocks (clock_offset.py);
* for each slice of these steps, when it was ready: two all-reduces of one maximum, 8 bytes a slice;
* a row of numbers of each rank (numbers.py), 55 bytes a step.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch.distributed as dist

from hvd_order.base.account.step_stats import StepStats
from hvd_order.base.errors import HorovodInternalError
from hvd_order.base.link.slice_settings import SliceSettings
from hvd_order.engine.account.comparison import RankComparison
from hvd_order.engine.account.noted_step import NotedStep
from hvd_order.engine.model_channel import ModelChannel

__all__: list[str] = []

_log = logging.getLogger("hvd_order")

_STEPS = 10  # that an exchange is about
_MOST_SLICES = 1 << 15  # that an exchange is about; fewer steps of a model with more slices


class StepAccount:
    """The account of one optimizer. The exchange's lock is held in all methods."""

    def __init__(self, channel: ModelChannel, talks: bool) -> None:
        """Starts without steps.

        Args:
            talks: the ranks take the same steps, so they can be compared.
        """
        self._channel = channel
        self._talks = talks and channel.host.size > 1
        self._off = "no_account" in channel.host.job.config.debug
        self._steps = 0
        self._last = 0  # the step after which the ranks talked last
        self._pause = _STEPS
        self._recorded: list[NotedStep] = []
        self._under_way: int | None = None  # handle of an exchange
        self._queued_ns: int | None = None
        self._comparison = RankComparison(channel.host, channel.key)

    @property
    def wants(self) -> bool:
        """Whether the step that has ended last is part of an exchange."""
        return not self._off and self._steps > self._last + self._pause - 1 - _STEPS

    def record(self, step: NotedStep) -> None:
        """Takes the step that has ended last. All ranks do so for the same steps."""
        self._recorded.append(step)

    def step_taken(self, queued: Callable[[], int | None]) -> None:
        """Handles the end of a step. Collective after some steps; waits for no other rank that has
        come to the exchange before.

        Args:
            queued: tells how long this thread has waited for a core, ns; None: not known.
        """
        self._steps += 1
        if self._off or self._steps < self._last + self._pause:
            return
        if not self._goes_on(self._settle):
            return
        steps = self._of_exchange()
        queued_s, queued_ns = 0.0, queued()
        if queued_ns is not None and self._queued_ns is not None:
            queued_s = (queued_ns - self._queued_ns) / 1e9 / (self._steps - self._last)
        self._queued_ns = queued_ns
        host = self._channel.host
        settings = host.slice_settings
        about = StepStats(
            steps=self._steps,
            slice_bytes=settings.slice_bytes,
            credit_bytes=settings.credit_bytes,
            way=_way(settings),
        )
        compare = partial(self._comparison.compare, steps, queued_s, about)
        self._last = self._steps
        # Of the exchange before, which has ended on all ranks: they have the same number.
        self._pause = self._comparison.pause
        if self._talks:
            self._goes_on(partial(self._begin, compare))
        elif steps:
            compare(None)

    def _of_exchange(self) -> list[NotedStep]:
        """The newest recorded steps, as many as an exchange may be about."""
        steps: list[NotedStep] = []
        slices = 0
        for step in reversed(self._recorded):
            slices += step.slices_count
            if steps and slices > _MOST_SLICES:
                break
            steps.append(step)
        self._recorded.clear()
        return steps[::-1]

    def end(self) -> None:
        """Waits for the exchange under way; no step follows, so nobody misses what it finds."""
        with contextlib.suppress(HorovodInternalError):
            self._settle()

    def _begin(self, compare: Callable[[dist.ProcessGroup], None]) -> None:
        self._under_way = handle = self._channel.begin("the account of steps", compare)
        # For an optimizer that is dropped before its next exchange.
        self._forget = weakref.finalize(self, self._channel.forget, handle)
        self._forget.atexit = False

    def _settle(self) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            self._forget.detach()
            self._channel.end(under_way)

    def _goes_on(self, work: Callable[[], None]) -> bool:
        """Ends the account, and not the training, if a rank takes no part any more: one that has
        taken its last step may leave. Raises the engine's failure, if it has failed.
        """
        try:
            work()
        except HorovodInternalError as error:
            self._channel.host.engine.check()
            self._off = True
            _log.debug("rank %d: no account any more: %s", self._channel.host.job.rank, error)
        return not self._off

    @property
    def stats(self) -> StepStats:
        """Of the last steps that the ranks have compared."""
        return replace(self._comparison.stats, steps=self._steps)


def _way(settings: SliceSettings) -> str:
    return (
        f"{settings.policy} order, {settings.agreement} agreement"
        + (", all-reduces split" if settings.split and not settings.coded else "")
        + (", codes of fewer bits" if settings.coded else "")
        + ("" if settings.cross_iteration else ", awaited in step()")
    )
