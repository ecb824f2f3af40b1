"""One collective in progress: what the ranks must agree on, and how its data moves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from hvd_order.base.errors import HorovodInternalError

__all__ = ["Request", "RequestDecision", "Transfer"]

Transfer = Callable[[dist.ProcessGroup | None], None]


@dataclass
class Request:
    """One collective.

    Attributes:
        name: unique among requests in flight, for example "allreduce.loss".
        lines: description that all ranks must agree on, one line for each item; the first line
            names the operation.
        transfer: moves the data; gets the group (None in a job of one process). Runs on the
            queue's thread, on a stream of its own for CUDA.
        finish: makes the result; runs in `CollectiveQueue.synchronize`, on the caller's thread.
        device: device of the data.
        stand_in: function that a joined rank calls in place of `transfer`; it is pickled. None:
            the collective makes no sense without all ranks.
        joined_take_part: ranks that have joined make this request by themselves.
        lacking: ranks that have not made this request for long, as reported by rank 0.
        decided: rank 0 has scheduled the request.
        ready_event, done_event: on a device, when the inputs and when the outputs are ready.
    """

    name: str
    lines: Sequence[str]
    transfer: Transfer
    finish: Callable[[], Any]
    device: torch.device
    stand_in: Transfer | None = None
    joined_take_part: bool = False
    lacking: Sequence[int] = ()
    decided: bool = False
    error: HorovodInternalError | None = None
    done: threading.Event = field(default_factory=threading.Event)
    ready_event: torch.Event | None = None
    done_event: torch.Event | None = None


@dataclass(frozen=True)
class RequestDecision:
    """Rank 0's message that schedules a request (name_order.py).

    Attributes:
        key: `name_order.key_of` its name.
        verdict: "go", "differ" or "refused".
        absent: joined ranks that have not made the request.
    """

    key: str
    verdict: str
    absent: list[int]
