"""What a link can do to a chain of layers, second by second, every choice tried."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache


def best_step_s(forward_s: Sequence[int], backward_s: Sequence[int], wire_s: Sequence[int]) -> int:
    """The shortest step of a chain if the link does something else every second, or nothing.

    Independent of the library: no order is assumed. Whole numbers, small ones. Time 0 is the end of
    a backward pass; the step is over when the next one ends.
    """
    count = len(wire_s)
    ready, before = [0] * count, 0
    for i in range(count):  # gradient 0 comes last
        ready[i] = -before
        before += backward_s[i]
    total_backward = sum(backward_s)

    @cache
    def end(now: int, left: tuple[int, ...], layer: int, runs_until: int) -> int:
        """When the forward pass ends. ``layer`` runs until then, or starts as soon as it may."""
        while now >= runs_until and now >= 0:
            if layer == count:
                return runs_until
            if left[layer]:
                break
            runs_until = max(now, runs_until) + forward_s[layer]
            layer += 1
        choices = [i for i in range(count) if left[i] and ready[i] <= now]
        ends = [end(now + 1, left, layer, runs_until)] if not choices or now < 0 else []
        for i in choices:
            after = (*left[:i], left[i] - 1, *left[i + 1 :])
            ends.append(end(now + 1, after, layer, runs_until))
        return min(ends)

    return end(-total_backward, tuple(wire_s), 0, 0) + total_backward
