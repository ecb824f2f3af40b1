"""A fixed order of slices for ``planned`` agreement: from a plan file, or from one observed step.

Rank 0's gradients are replayed at the times at which they became ready, through the real Scheduler
under the policy of the slice settings, over a link that moves one slice after the other at the
measured rate. The order in which slices were issued is the plan. While steps resemble the observed
one, a rank that follows the plan strictly starts no slice much before or after the moment at which
the dynamic policy would have started it.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Sequence

from hvd_order._native import _torch as native
from hvd_order.base.link.link_model import LinkModel, transfer_s
from hvd_order.base.link.slice_settings import SliceSettings

__all__: list[str] = []

_ROUNDS = 3


def arrival_plan(layout: native.SliceLayout) -> list[int]:
    """Returns the order before any measurement: about the reverse of consumption order.

    If all-reduces are split, all-gathers follow in consumption order.
    """
    gathers = [
        i for i, piece in enumerate(layout.slices) if piece.operation == native.Operation.ALL_GATHER
    ]
    return list(range(len(layout.slices) - len(gathers)))[::-1] + gathers


def by_name(layout: native.SliceLayout, issue_order: Sequence[str]) -> list[int] | None:
    """Returns the order that a plan file names; None if its slices differ from the layout's."""
    numbers = {layout.slice_name(i): i for i in range(len(layout.slices))}
    if numbers.keys() != set(issue_order):
        return None
    return [numbers[name] for name in issue_order]


def replay(
    layout: native.SliceLayout,
    ready_s: Sequence[float],
    link: LinkModel,
    settings: SliceSettings,
) -> list[int]:
    """Returns the order in which a dynamic policy issues the slices of one step.

    Args:
        layout: slices of the model.
        ready_s: time at which each gradient becomes ready, in seconds, by TensorId.
        link: cost of a slice and of a byte while the link is busy.
        settings: credit and policy; the slices are the layout's.
    """
    scheduler = native.Scheduler(
        getattr(native.Policy, settings.policy.upper()), settings.credit_bytes
    )
    scheduler.add_model(0, layout)
    arrivals = [(at, tensor) for tensor, at in enumerate(ready_s)]
    if layout.is_split:
        arrivals.append((min(ready_s), layout.squares_tensor))
    heapq.heapify(arrivals)
    in_flight: deque[tuple[float, int]] = deque()  # (done at, slice), in order of issue
    plan: list[int] = []
    # Each half of a split all-reduce moves half of its bytes.
    whole = native.Operation.ALL_REDUCE
    costs = [
        piece.size_bytes if piece.operation == whole else piece.size_bytes // 2
        for piece in layout.slices
    ]
    link_free = 0.0
    while arrivals or in_flight:
        if in_flight and (not arrivals or in_flight[0][0] <= arrivals[0][0]):
            now, slice_ = in_flight.popleft()
            scheduler.slice_done(0, slice_)
        else:
            now, tensor = heapq.heappop(arrivals)
            scheduler.tensor_ready(0, tensor)
        for model, ready in scheduler.became_ready():
            scheduler.offer(model, ready)
        while (issued := scheduler.next()) is not None:
            link_free = max(link_free, now) + transfer_s(costs[issued[1]], link)
            in_flight.append((link_free, issued[1]))
            plan.append(issued[1])
    return plan


def seconds_per_byte(
    layout: native.SliceLayout, ready: Callable[[int], None], wait: Callable[[int], None]
) -> float:
    """Measures a transport that never idles: all tensors at once, best of three rounds.

    Args:
        layout: slices of the model.
        ready: hands a tensor to the engine.
        wait: waits for a tensor.
    """
    tensors = range(len({t for s in range(len(layout.slices)) for t in layout.tensors_of(s)}))
    best = float("inf")
    for _ in range(_ROUNDS):
        start = time.monotonic()
        for tensor in tensors:
            ready(tensor)
        for tensor in tensors:
            wait(tensor)
        best = min(best, time.monotonic() - start)
    return best / max(1, sum(layout.buffer_bytes))
