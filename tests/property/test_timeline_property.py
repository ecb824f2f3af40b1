"""What holds for the parts of every timeline and for their merger."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from helpers.property_cases import cases
from hypothesis import given
from hypothesis import strategies as st

from hvd_order.base.account.clock_offset import ClockOffset
from hvd_order.engine.tracing.events import Event, event
from hvd_order.engine.tracing.gather import joined, pieces
from hvd_order.engine.tracing.merge import RankPart, merged
from hvd_order.engine.tracing.passes import Moment, passes

SLICES, PERIOD_NS = 3, 10_000_000
_US = 0.01  # of rounding
texts = st.text(max_size=20)
offsets = st.integers(-(10**12), 10**12)


@cases(50)
@given(names=st.lists(texts, max_size=20), repeats=st.sampled_from([1, 5000]))
def test_a_part_arrives_as_it_was_sent(names: list[str], repeats: int) -> None:
    part = RankPart(events=[event("wait", name, 1, 2, {}) for name in names] * repeats)
    sent = [json.loads(json.dumps(message)) for message in pieces(part)]
    assert [message[:3] for message in sent] == [
        ["trace", number, len(sent)] for number in range(len(sent))
    ]
    assert joined(message[3] for message in sent) == part


@cases(100)
@given(text=st.one_of(texts, st.sampled_from(["eJw=", "", "AAAA"])))
def test_anything_else_is_no_part(text: str) -> None:
    assert joined([text]) is None


def transfers(first: int, steps: int, offset_ns: int) -> list[Event]:
    """A rank's transfers from step ``first`` of the job on, numbered from 0, on its own clock."""
    found = []
    for step in range(first, first + steps):
        for number in range(SLICES):
            begin = step * PERIOD_NS + number * 1_000_000 + offset_ns
            about = {"model": 0, "slice": number, "step": step - first}
            found.append(event("transfer", f"s{number}", begin, begin + 900_000, about))
    return found


@cases(100)
@given(
    offset_ns=offsets,
    drift_ns=st.integers(-50_000, 50_000),
    first=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    steps=st.integers(3, 6),
    error_ns=st.integers(1, 400_000),
)
def test_ranks_are_on_one_clock_and_number_steps_alike(
    offset_ns: int, drift_ns: int, first: tuple[int, int], steps: int, error_ns: int
) -> None:
    parts = {r: RankPart(events=transfers(first[r], steps, offset_ns * r)) for r in range(2)}
    clocks = [
        ClockOffset(at + offset_ns - error_ns, at + offset_ns + error_ns, at_ns)
        for at, at_ns in ((0, offset_ns), (drift_ns, offset_ns + 10 * PERIOD_NS))
    ]
    document: Any = json.loads(json.dumps(merged(parts, {1: clocks})))
    said_us = document["otherData"]["clock_error_us"]
    times: dict[int, dict[tuple[int, int], float]] = {0: {}, 1: {}}
    for each in document["traceEvents"]:
        if each["ph"] == "X":
            times[each["pid"]][each["args"]["step"], each["args"]["slice"]] = each["ts"]
    shared = times[0].keys() & times[1].keys()
    assert len(shared) == SLICES * (steps - abs(first[0] - first[1]))
    # The clock of this rank 1 stands still beside rank 0's, so the drift is an error, too.
    allowed_us = said_us + abs(drift_ns) / 1e3 + 1
    assert all(abs(times[0][key] - times[1][key]) <= allowed_us for key in shared)


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[Moment], int]:
    """Moments of steps with one to three backward passes each, deferred or not."""
    found: list[Moment] = []
    backward = 0

    def note(kind: Any) -> None:
        found.append(Moment(100 * (len(found) + 1), kind, 0, ()))

    for _ in range(draw(st.integers(0, 4))):
        for _ in range(draw(st.integers(1, 3))):
            backward += 1
            note("backward")
            note("backward_end")
        deferred = draw(st.booleans())
        note("deferred" if deferred else "step")
        for _ in range(draw(st.integers(1, 3)) if deferred else 0):
            note("read")
    return found, backward


@cases(100)
@given(program=programs())
def test_passes_follow_each_other(program: tuple[list[Moment], int]) -> None:
    moments, backward = program
    found = passes(moments, ())
    names = [each["name"] for each in found]
    assert names == ["backward", "forward"] * (backward - 1) + ["backward"] * (backward > 0)
    for before, after in pairwise(found):
        assert before["ts"] + before["dur"] <= after["ts"] + _US
    assert all(each["name"] == "backward" for each in passes(moments, ("forward",)))


def test_a_backward_pass_of_two_models_is_one() -> None:
    kinds: list[tuple[Any, int]] = [
        ("backward", 0), ("backward", 1), ("backward_end", 1), ("backward_end", 0),
    ]  # fmt: skip
    (only,) = passes([Moment(1000 * i, kind, m) for i, (kind, m) in enumerate(kinds)], ())
    assert (only["name"], only["ts"], only["dur"]) == ("backward", 0.0, 3.0)
