"""What a link can do to a chain of layers clipped by the global norm, every choice tried."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Literal

Gathers = Literal["early", "late", "before the norm"]

_PATIENCE = 2  # until then, from the end of the backward pass, the link may idle beside work


def best_clipped_step_s(
    forward_s: Sequence[int],
    backward_s: Sequence[int],
    half_s: Sequence[int],
    barrier_s: int = 0,
    gathers: Gathers = "early",
) -> int:
    """The shortest step if the link does something else every second, or nothing.

    Independent of the library: no order and no formula is assumed. Time 0 is the end of a backward
    pass; the step is over when the next one ends.

    Args:
        half_s: time of either half of each layer's all-reduce, in whole seconds. A second of a
            gather needs the same second of its scatter before.
        barrier_s: from the last scatter's end until the norm is known, in whole seconds.
        gathers: whether they may begin before the norm is known, or even have to end before it, as
            in a whole all-reduce.
    """
    count = len(half_s)
    ready = [-sum(backward_s[:i]) for i in range(count)]  # gradient 0 comes last
    total_backward = sum(backward_s)

    @cache
    def end(
        now: int,
        scatter: tuple[int, ...],
        gather: tuple[int, ...],
        norm_at: int | None,
        layer: int,
        runs_until: int,
    ) -> int:
        """When the forward pass ends. ``layer`` runs until then, or starts as soon as it may."""
        awaited = sum(scatter) + (sum(gather) if gathers == "before the norm" else 0)
        if norm_at is None and not awaited:
            norm_at = max(now, 0) + barrier_s
        known = norm_at is not None and now >= norm_at
        while known and now >= runs_until:
            if layer == count:
                return max(now, runs_until)
            if gather[layer]:
                break
            runs_until = now + forward_s[layer]
            layer += 1
        ends = []
        for i in range(count):
            if scatter[i] and ready[i] <= now:
                ends.append(end(now + 1, _less(scatter, i), gather, norm_at, layer, runs_until))
            if gather[i] > scatter[i] and (known or gathers != "late"):
                ends.append(end(now + 1, scatter, _less(gather, i), norm_at, layer, runs_until))
        if not ends or now < _PATIENCE:
            ends.append(end(now + 1, scatter, gather, norm_at, layer, runs_until))
        return min(ends)

    return end(-total_backward, tuple(half_s), tuple(half_s), None, 0, 0) + total_backward


def _less(left: tuple[int, ...], i: int) -> tuple[int, ...]:
    return (*left[:i], left[i] - 1, *left[i + 1 :])
