"""A latency-bandwidth model of a transport from timed streams of slices.

The quick measurement before training (``LinkModel.from_streams``) solves two streams; this module
fits several, for the more accurate link model of a profile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hvd_order.base.errors import InvalidUsage
from hvd_order.base.link.link_model import LinkModel

__all__ = ["SliceStream", "fit_line", "fit_link"]


@dataclass(frozen=True)
class SliceStream:
    """Slices of one size that were sent with several in flight at a time.

    Attributes:
        slice_bytes: size of each slice.
        slice_s: total time divided by the number of slices.
    """

    slice_bytes: int
    slice_s: float


def fit_link(latency_s: float, streams: Sequence[SliceStream]) -> LinkModel:
    """The line ``slice_cost_s + n seconds_per_byte`` of `fit_line` through the streams.

    Args:
        latency_s: time of a nearly empty all-reduce, alone.
        streams: streams of at least two sizes.

    Raises:
        InvalidUsage: too few sizes, or a time that is not positive.

    Source:
        Hockney, Parallel Computing 20, 1994, for the model.
    """
    if len({stream.slice_bytes for stream in streams}) < 2:
        raise InvalidUsage("a line needs streams of two sizes of slices at least")
    if not all(math.isfinite(s.slice_s) and s.slice_s > 0 for s in streams):
        raise InvalidUsage("a slice that took no time cannot be fitted; measure again")
    cost_s, per_byte_s = fit_line([(stream.slice_bytes, stream.slice_s) for stream in streams])
    if per_byte_s <= 0:
        # Size made no difference: only the cost remains; it covers the largest slice's bytes.
        per_byte_s = cost_s / max(stream.slice_bytes for stream in streams) / 100
    # Same as LinkModel.from_streams: slices hide each other's latency on an idle machine only.
    return LinkModel(latency_s, max(cost_s, latency_s / 2, 1e-6), per_byte_s)


def fit_line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """The line ``cost + n * slope`` with the least *relative* error; neither part is negative.

    An error of 1 ms is little for 8 MiB and much for 64 KiB, so each point is weighted by the
    inverse square of its time. If the unbounded fit violates a bound, the best line at that bound
    is taken.

    Args:
        points: (bytes, seconds), of two sizes at least; seconds are positive.

    Returns:
        Seconds, and seconds per byte.
    """
    # In units of each point's own time the model says 1 = cost x + slope y.
    xs = [1 / seconds for _, seconds in points]
    ys = [size / seconds for size, seconds in points]
    xx, yy, xy = _dot(xs, xs), _dot(ys, ys), _dot(xs, ys)
    x1, y1 = math.fsum(xs), math.fsum(ys)
    determinant = xx * yy - xy * xy
    cost_s = (x1 * yy - y1 * xy) / determinant
    slope_s = (xx * y1 - xy * x1) / determinant
    if cost_s < 0:
        return 0.0, y1 / yy
    if slope_s <= 0:
        return x1 / xx, 0.0
    return cost_s, slope_s


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))
