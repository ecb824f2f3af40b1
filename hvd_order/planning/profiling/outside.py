"""Adds to a profile's operators the time that operators leave out, each part at its place.

The time of a step that was not recorded is what all times have to add up to. What the operators
lack of it lies in pauses between them. A recorded pause also has time that the recording took,
about the same each time that it was entered. So the same time, the *level*, is taken off for each
of them, as much as makes the sum right. A pause that is long for another reason keeps its length.

Pauses between two places where a step can wait for a parameter or release a gradient make one op:
when ops run in program order, their place among the operators there makes no difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hvd_order.planning.files.outside import OUTSIDE
from hvd_order.planning.files.profile import middle
from hvd_order.planning.graph.graph import Phase
from hvd_order.planning.profiling.recording import Mark, OperatorCall

__all__ = ["ProfiledStep", "TimedOp", "with_outside"]

_HALVINGS = 50
_DEPENDED_ON = 0.01  # part of the step from which on other ops wait for what was done outside


@dataclass
class TimedOp:
    """An op of the profile; ``inputs`` are places in the list of all of them."""

    call: OperatorCall
    inputs: list[int]
    seconds: list[float]


@dataclass
class ProfiledStep:
    """A recorded step."""

    marks: Sequence[Mark]
    seconds: Sequence[float]  # of each operator


@dataclass
class _StepSegment:
    """Operators and pauses between two places where a step can wait or release a gradient.

    Attributes:
        marks: numbers of the marks at which its pauses end.
        calls: numbers of its operators.
        reads: parameters that are read at its beginning, by no operator as far as is known.
        gradient: the mark of the gradient at its end.
    """

    phase: Phase
    marks: list[int] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    reads: tuple[str, ...] = ()
    gradient: Mark | None = None


def with_outside(
    calls: Sequence[OperatorCall],
    steps: Sequence[ProfiledStep],
    plain_s: float,
    before_s: float | None,
) -> list[TimedOp]:
    """The operators of a step, and ops for the time outside of them.

    Args:
        calls: the operators.
        steps: recorded ones that ran these operators.
        plain_s: time of a step that was not recorded.
        before_s: the part of it before the model's first call; None: as in the recorded steps.
    """
    marks = steps[0].marks
    begin = next((i for i, mark in enumerate(marks) if mark.kind == "begin"), -1)
    first = marks[begin].call if begin >= 0 else 0
    pauses = [_pauses(marks, step.marks) for step in steps]
    if before_s is None:
        before_s = middle(
            [sum(step.seconds[:first]) + sum(pause[: begin + 1])
             for step, pause in zip(steps, pauses, strict=True)]
        )  # fmt: skip
    times = [[step.seconds[i] for step in steps] for i in range(len(calls))]
    busy_s = sum(middle(runs) for runs in times[first:])
    lacking_s = plain_s - before_s - busy_s
    if lacking_s < 0 < busy_s:  # the call of an operator takes longer while it is recorded
        part = max(plain_s - before_s, 0.0) / busy_s
        times[first:] = [[part * seconds for seconds in runs] for runs in times[first:]]
    segments = _segments(calls, marks, begin)
    weights = [mark.passes for mark in marks]
    level_s = _level(segments, pauses, weights, lacking_s)
    outside = [_above(segment, pauses, weights, level_s) for segment in segments]
    return _merged(calls, times, marks, segments, outside, _DEPENDED_ON * (plain_s - before_s))


def _pauses(marks: Sequence[Mark], others: Sequence[Mark]) -> list[float]:
    """Pauses of another step that end at the places of ``marks``.

    Gradients of two threads may come in another order, so places are found by name.
    """
    found: dict[tuple[object, ...], float] = {}
    for key, mark in zip(_keys(others), others, strict=True):
        found[key] = mark.pause_s
    return [found.get(key, 0.0) for key in _keys(marks)]


def _keys(marks: Sequence[Mark]) -> list[tuple[object, ...]]:
    counts: Counter[tuple[object, ...]] = Counter()
    keys: list[tuple[object, ...]] = []
    for mark in marks:
        name = (
            mark.kind,
            mark.names,
            mark.call if mark.kind in ("call", "view", "enter") else None,
        )
        counts[name] += 1
        keys.append((*name, counts[name]))
    return keys


def _segments(
    calls: Sequence[OperatorCall], marks: Sequence[Mark], begin: int
) -> list[_StepSegment]:
    """Cuts a step where a parameter is first read, a gradient is complete, or a phase ends."""
    by_operators = {name for call in calls if call.phase == "forward" for name in call.reads}
    read: set[str] = set()
    segments = [_StepSegment("forward")]

    def cut(phase: Phase, reads: tuple[str, ...] = ()) -> None:
        segments.append(_StepSegment(phase, reads=reads))
        read.update(reads)

    for i in range(begin + 1, len(marks)):
        mark, now = marks[i], segments[-1]
        call = calls[mark.call] if mark.call < len(calls) else None
        if mark.kind == "call":
            assert call is not None
            if call.phase != now.phase:
                cut(call.phase)
            segments[-1].marks.append(i)
            if read.issuperset(call.reads):
                segments[-1].calls.append(mark.call)
            else:
                cut(call.phase)
                read.update(call.reads)
                segments[-1].calls.append(mark.call)
            continue
        if mark.kind == "gradient" and now.phase != "backward":
            cut("backward")
        now = segments[-1]
        now.marks.append(i)
        new = tuple(name for name in mark.names if name not in read)
        if mark.kind == "gradient":
            now.gradient = mark
            cut("backward")
        elif mark.kind == "update":
            cut("update")
        elif mark.kind == "view" and new and not (call and set(new) & set(call.reads)):
            cut(now.phase, new)
        elif mark.kind == "enter":
            # Code that an operator's record does not show may read what no operator does.
            new = tuple(name for name in new if name not in by_operators)
            if new and not _viewed_next(marks, i, new):
                cut(now.phase, new)
    return segments


def _viewed_next(marks: Sequence[Mark], entered: int, names: Sequence[str]) -> bool:
    """Whether a view of all these parameters comes before the next operator."""
    seen: set[str] = set()
    for mark in marks[entered + 1 :]:
        if mark.kind == "view":
            seen.update(mark.names)
        if mark.kind in ("call", "gradient"):
            break
    return seen.issuperset(names)


def _level(
    segments: Sequence[_StepSegment],
    pauses: Sequence[Sequence[float]],
    weights: Sequence[int],
    lacking_s: float,
) -> float:
    """The time that each pass takes, so that what is left of all pauses is ``lacking_s``."""
    low, high = 0.0, max((max(pause, default=0.0) for pause in pauses), default=0.0)
    for _ in range(_HALVINGS):
        level_s = (low + high) / 2
        left_s = sum(middle(_above(segment, pauses, weights, level_s)) for segment in segments)
        low, high = (level_s, high) if left_s > lacking_s else (low, level_s)
    return high


def _above(
    segment: _StepSegment, pauses: Sequence[Sequence[float]], weights: Sequence[int], level_s: float
) -> list[float]:
    """In each step, what a segment's pauses are above the level."""
    return [
        sum(max(pause[i] - weights[i] * level_s, 0.0) for i in segment.marks) for pause in pauses
    ]


def _merged(
    calls: Sequence[OperatorCall],
    times: Sequence[list[float]],
    marks: Sequence[Mark],
    segments: Sequence[_StepSegment],
    outside: Sequence[list[float]],
    depended_on_s: float,
) -> list[TimedOp]:
    """Puts ops for the time outside between the operators, in program order."""
    result: list[TimedOp] = []
    place: dict[int, int] = {}  # of an operator in the result
    last_outside: int | None = None

    def add(number: int) -> None:
        call = calls[number]
        inputs = [place[i] for i in call.inputs]
        if call.new_memory and last_outside is not None:
            inputs.append(last_outside)
        place[number] = len(result)
        result.append(TimedOp(call, inputs, list(times[number])))

    def add_outside(segment: _StepSegment, longest: int, seconds: list[float]) -> None:
        nonlocal last_outside
        name = f"{marks[longest].module}/{OUTSIDE}"
        resource = _resource(calls, marks[longest].call)
        call = OperatorCall(name, segment.phase, resource, [], list(segment.reads))
        if middle(seconds) >= depended_on_s:
            last_outside = len(result)
        result.append(TimedOp(call, [len(result) - 1] if result else [], seconds))

    in_segments = {number for segment in segments for number in segment.calls}
    for number in range(len(calls)):  # those before the model begins
        if number in in_segments:
            break
        add(number)
    for segment, seconds in zip(segments, outside, strict=True):
        gradient = segment.gradient
        there = middle(seconds) > 0 or bool(segment.reads)
        alone = gradient is not None and gradient.unknown and not segment.calls
        if not segment.marks and not there:
            for number in segment.calls:
                add(number)
            continue
        longest = max(segment.marks, key=lambda i: marks[i].pause_s, default=0)
        before = 0 if segment.reads else sum(n < marks[longest].call for n in segment.calls)
        for number in segment.calls[:before]:
            add(number)
        if there or alone:
            add_outside(segment, longest, seconds)
            behind = {name for number in segment.calls[before:] for name in calls[number].produces}
            if gradient is not None and behind.isdisjoint(gradient.names):
                result[-1].call.produces += gradient.names  # autograd had to wait for it
        for number in segment.calls[before:]:
            add(number)
        if gradient is not None and gradient.unknown and result:
            last = result[-1]
            if gradient.names[0] not in last.call.produces:
                last.call = replace(last.call, produces=[*last.call.produces, *gradient.names])
    return result


def _resource(calls: Sequence[OperatorCall], place: int) -> str:
    """What waits for the host there: the resource of the operator behind it."""
    return calls[min(place, len(calls) - 1)].resource if calls else "compute"
