"""One collective on its way: what the ranks have to agree on, and how its data move."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from hvd_order.errors import HorovodInternalError

__all__ = ["Decision", "Exchange", "Request"]

Exchange = Callable[[dist.ProcessGroup | None], None]


@dataclass
class Request:
    """One collective.

    Attributes:
        name: unique among those in flight, for example "allreduce.loss".
        lines: what all ranks must agree on, one line an item; the first says which operation.
        exchange: moves the data; gets the group (None in a job of one process). Runs on the
            queue's thread, on a stream of its own for CUDA.
        finish: makes the result; runs in `CollectiveQueue.synchronize`, on the caller's thread.
        device: where the data are.
        stand_in: what a rank that has joined does in place of `exchange`; it is pickled. None: the
            collective makes no sense without all ranks.
        lacking: the ranks that have not made this request for long, once rank 0 has said so.
        decided: rank 0 has said that it is its turn.
        ready_event, done_event: on CUDA, when the inputs and when the outputs are there.
    """

    name: str
    lines: Sequence[str]
    exchange: Exchange
    finish: Callable[[], Any]
    device: torch.device
    stand_in: Exchange | None = None
    lacking: Sequence[int] = ()
    decided: bool = False
    error: HorovodInternalError | None = None
    done: threading.Event = field(default_factory=threading.Event)
    ready_event: torch.cuda.Event | None = None
    done_event: torch.cuda.Event | None = None


@dataclass(frozen=True)
class Decision:
    """It is the turn of a request; what rank 0 says about it (name_order.py).

    Attributes:
        key: `name_order.key_of` its name.
        verdict: "go", "differ" or "refused".
        absent: ranks that have joined and have not made the request.
    """

    key: str
    verdict: str
    absent: list[int]
