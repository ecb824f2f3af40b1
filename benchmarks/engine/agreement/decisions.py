"""First question: how many slices a second, when a slice is so small that only deciding counts."""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import hvd_order.torch as hvd
from benchmarks.engine.agreement.exchanges import Ordered
from benchmarks.runner.ranks import new_host, seconds_of, slowest
from benchmarks.runner.turns import take_turns
from hvd_order._native import _torch as native

SLICE_BYTES = 4096
IN_FLIGHT = 4


def measure_decisions(options: argparse.Namespace, group: dist.ProcessGroup) -> dict[str, Any]:
    """Seconds for all slices, by variant and round; the slowest rank's."""
    count = options.slices
    device = torch.device("cpu")
    buffer = torch.empty(count * SLICE_BYTES // 4)
    views = buffer.split(SLICE_BYTES // 4)
    layout = native.SliceLayout([(f"t{i}", SLICE_BYTES, 0) for i in range(count)], SLICE_BYTES)

    def plain() -> None:
        works: deque[Any] = deque()
        for view in reversed(views):
            if len(works) >= IN_FLIGHT:
                works.popleft().wait()
            works.append(dist.all_reduce(view, group=group, async_op=True))
        for work in works:
            work.wait()

    def ours(exchange: Ordered) -> None:
        for tensor in reversed(range(count)):
            exchange.ready(tensor)
        for tensor in range(count):
            exchange.wait(tensor)

    variants: dict[str, Callable[[], None]] = {"plain": plain}
    for kind in options.agreements:
        host = new_host(
            agreement=kind, slice_bytes=SLICE_BYTES, credit_bytes=IN_FLIGHT * SLICE_BYTES
        )
        exchange = Ordered(host, layout, [buffer], planned=kind == "planned")
        variants[kind] = lambda exchange=exchange: ours(exchange)

    right = True

    def measured(work: Callable[[], None]) -> float:
        nonlocal right
        buffer.fill_(hvd.rank() + 1)
        seconds = seconds_of(work, device)
        right &= bool((buffer == hvd.size() * (hvd.size() + 1) // 2).all())
        return seconds

    seconds = take_turns(
        {name: lambda work=work: measured(work) for name, work in variants.items()},
        options.rounds,
        options.warm_up,
    )
    return {
        "slices": count,
        "seconds": {name: slowest(values) for name, values in seconds.items()},
        "right": right,
    }
