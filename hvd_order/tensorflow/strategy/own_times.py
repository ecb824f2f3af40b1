"""How long each operation of a step took, as a model that runs one at a time needs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hvd_order.tensorflow.strategy.trace import Timed

__all__ = ["own_times"]


def own_times(intervals: Sequence[tuple[str, Timed]], ready: Mapping[str, int]) -> dict[str, int]:
    """Time of each operation, so that all together are the time in which the worker was at work.

    While several operations run at once, time counts for each of them in equal parts. While none
    runs, it counts for the next one, as it is the executor's work on it; except for the time in
    which that one waits for parameters.

    Args:
        intervals: operations and when they ran, of one step.
        ready: by operation: when the last parameter that it reads had come; 0: it reads none.

    Returns:
        Picoseconds by operation.
    """
    took = dict.fromkeys((name for name, _ in intervals), 0.0)
    points = sorted(
        point
        for i, (_, timed) in enumerate(intervals)
        if timed.end_ps > timed.begin_ps
        for point in ((timed.begin_ps, 1, i), (timed.end_ps, 0, i))
    )
    running: set[int] = set()
    last = 0
    for at, begins, i in points:
        for one in running:
            took[intervals[one][0]] += (at - last) / len(running)
        if begins and not running:
            since = max(last, ready.get(intervals[i][0], 0))
            if since:  # not of the first operation, if it reads nothing
                took[intervals[i][0]] += max(0, at - since)
        last = at
        if begins:
            running.add(i)
        else:
            running.discard(i)
    return {name: round(each) for name, each in took.items()}
