"""The fastest step that any synchronous method can have on a chain of layers."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def optimum_s(
    forward_s: Sequence[float], backward_s: Sequence[float], wire_s: Sequence[float]
) -> float:
    """Steady-state step time of the fluid preemptive schedule in consumption order.

    One device computes forward 0, 1, ..., n-1 and backward n-1, ..., 0; one link moves the gradient
    of a layer as soon as its backward is done, always that which is needed first, and drops
    anything at once for something more urgent, at no cost. Forward i of the next step waits for
    gradient i of this one.

    The link's rule is earliest due date with preemption, which is optimal for the maximum lateness
    of jobs with release times on one machine; here each layer's due time is its forward start.

    Source:
        Horn, "Some simple scheduling algorithms", Naval Research Logistics 21, 1974.

    Args:
        forward_s, backward_s: by layer, in seconds.
        wire_s: how long the layer's gradient occupies the link when it has it for itself.
    """
    count = len(wire_s)
    now = 0.0
    arrived = [0.0] * count
    starts: list[float] = []
    for _ in range(_ROUNDS):
        starts.append(now)
        for i in range(count):
            now = max(now, arrived[i]) + forward_s[i]
        releases = []
        for i in reversed(range(count)):
            now += backward_s[i]
            releases.append((now, i))
        arrived = _link(releases, wire_s)
    return starts[-1] - starts[-2]


# What is left over from one step never outlives the next forward pass, so the first steps are
# already periodic but for their start.
_ROUNDS = 6


def _link(releases: Sequence[tuple[float, int]], wire_s: Sequence[float]) -> list[float]:
    """When each layer's gradient has arrived, given when each is ready, in order of time."""
    arrived = [0.0] * len(wire_s)
    waiting: list[list[float]] = []  # (layer, seconds left)
    now = 0.0
    for k, (ready, layer) in enumerate(releases):
        now = max(now, ready)
        heapq.heappush(waiting, [layer, wire_s[layer]])
        until = releases[k + 1][0] if k + 1 < len(releases) else float("inf")
        while waiting and now < until:
            first = waiting[0]
            spent = min(first[1], until - now)
            first[1] -= spent
            now += spent
            if first[1] <= 0.0:
                arrived[int(heapq.heappop(waiting)[0])] = now
    return arrived
