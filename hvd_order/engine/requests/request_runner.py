"""Runs a scheduled request, or its stand-in on a joined rank."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hvd_order.base.errors import HorovodInternalError, ModelMismatch
from hvd_order.engine.job import group_collectives
from hvd_order.engine.requests.mismatch import explain_mismatch, ranks_have
from hvd_order.engine.requests.request import Request, RequestDecision, Transfer

__all__ = ["RequestRunner", "StillInStep"]


class StillInStep(Exception):  # noqa: N818  (says what it tells)
    """A request fails on all ranks, and all of them have the error; later requests are not
    affected.
    """

    def __init__(self, error: HorovodInternalError) -> None:
        super().__init__(str(error))
        self.error = error


class RequestRunner:
    """Moves the data of a process set's requests, one after the other, on one thread.

    Attributes:
        stand_in_device: the CUDA device for zeros while this rank has joined; None: there is none.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], rank: int) -> None:
        """Creates the runner; moves no data yet.

        Args:
            group: process group of the set.
            ranks: ranks in the job, by place in the group.
            rank: this rank.
        """
        self.stand_in_device: int | None = None
        self._group = group
        self._ranks = ranks
        self._rank = rank
        self._streams: dict[torch.device, torch.Stream] = {}

    def run(self, decision: RequestDecision, request: Request | None) -> None:
        """Runs the transfer of a request, or the stand-in if this rank has no request.

        Raises:
            StillInStep: the request cannot run, and no rank has begun.
            Exception: the transfer's error; the ranks may be out of step.
        """
        if decision.verdict == "differ":
            lines = [] if request is None else request.lines
            raise StillInStep(self._difference(lines))
        if decision.verdict == "refused":
            what = decision.key if request is None else request.name
            raise StillInStep(HorovodInternalError(
                f"{what} needs every rank, and {ranks_have(decision.absent)} joined; only "
                "allreduce, allgather, reducescatter and barrier go on without ranks that have "
                "joined"
            ))  # fmt: skip
        transfer = None if request is None else request.transfer
        if decision.absent:
            stand_in = self._share_stand_in(request, decision.absent)
            transfer = transfer or stand_in
        assert transfer is not None
        if request is None or request.ready_event is None:
            with _device_context(None if request else self.stand_in_device):
                transfer(self._group)
            return
        accelerator = torch.get_device_module(request.device)
        stream = self._streams.get(request.device)
        if stream is None:
            stream = accelerator.Stream(request.device)
            self._streams[request.device] = stream
        with accelerator.device(request.device), accelerator.stream(stream):
            stream.wait_event(request.ready_event)
            transfer(self._group)
            request.done_event = accelerator.Event()
            request.done_event.record(stream)

    def _share_stand_in(self, request: Request | None, absent: list[int]) -> Transfer:
        """Returns the function that absent ranks run; the first present rank sends it."""
        root = next(place for place, rank in enumerate(self._ranks) if rank not in absent)
        mine = None if request is None else request.stand_in
        stand_in: Transfer = group_collectives.share_object(mine, root, self._group)
        return stand_in

    def _difference(self, lines: Sequence[str]) -> ModelMismatch:
        """Returns the error that all ranks raise when lines differ; no lines: this rank has
        joined.
        """
        everyone = group_collectives.gather_objects(list(lines), self._group)
        there = [(rank, own) for rank, own in zip(self._ranks, everyone, strict=True) if own]
        return ModelMismatch(
            explain_mismatch([lines for _, lines in there], [rank for rank, _ in there])
        )


def _device_context(device: int | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if device is None else torch.cuda.device(device)
