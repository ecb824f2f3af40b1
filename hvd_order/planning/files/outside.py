"""Ops of a profile that stand for time outside of operators, and a line about them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hvd_order.planning.files.profile import Profile
from hvd_order.planning.graph.graph import Graph, GraphOp

__all__ = ["OUTSIDE", "is_outside", "outside_line"]

OUTSIDE = "outside"  # the last part of such an op's name

_WORTH_A_LINE = 0.05  # part of the step
_MOST_PLACES = 3


def is_outside(op: GraphOp) -> bool:
    """Whether an op stands for time outside of operators: numpy, an extension, Python, a wait."""
    return op.name.rpartition("/")[2].partition("#")[0] == OUTSIDE


def outside_line(profile: Profile) -> str | None:
    """Says how much of a step passes outside of operators, and where; None up to 5 % of it."""
    graph = profile.graph("median")
    outside = [i for i, op in enumerate(graph.ops) if is_outside(op)]
    all_s = sum(graph.ops[i].duration_s for i in outside)
    if all_s <= _WORTH_A_LINE * graph.compute_s:
        return None
    longest = sorted(outside, key=lambda i: -graph.ops[i].duration_s)[:_MOST_PLACES]
    places = [
        f"{_time(graph.ops[i].duration_s)} {_place(graph, i)}"
        for i in longest
        if graph.ops[i].duration_s >= 0.1 * all_s
    ]
    where = f": {'; '.join(places)}" if places else ", in many places"
    return (
        f"{all_s / graph.compute_s:.0%} of the step ({_time(all_s)}) pass outside of "
        f"operators, in numpy, extensions, waits or Python{where}"
    )


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _place(graph: Graph, place: int) -> str:
    """Between which reads in forward, or which gradients in backward, an op runs."""
    op = graph.ops[place]
    if op.phase == "update":
        return "in the update"
    if op.phase == "backward":
        complete = {
            producers[-1]: graph.parameters[i].name
            for i, producers in _last_first(graph.producers)
            if producers
        }
        before = _first(complete, range(place - 1, -1, -1))
        behind = _first(complete, range(place, len(graph.ops)))
        return f"in backward, {_between('gradient', before, behind)}"
    first = {
        readers[0]: graph.parameters[i].name for i, readers in _last_first(graph.readers) if readers
    }
    before = _first(first, range(place, -1, -1))
    behind = _first(first, range(place + 1, len(graph.ops)))
    return f"in forward, {_between('first read', before, behind)}"


def _last_first(ops: Sequence[tuple[int, ...]]) -> list[tuple[int, tuple[int, ...]]]:
    """By parameter, the first last: of a weight and its bias the weight's name remains."""
    return list(enumerate(ops))[::-1]


def _first(names: dict[int, str], places: range) -> str | None:
    found: Iterator[str] = (names[i] for i in places if i in names)
    return next(found, None)


def _between(what: str, before: str | None, behind: str | None) -> str:
    if before is not None and behind is not None:
        return f"between the {what}s of {before!r} and {behind!r}"
    if before is not None:
        return f"behind the {what} of {before!r}"
    return f"before the {what} of {behind!r}" if behind is not None else "at no parameter"
