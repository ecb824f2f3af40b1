"""The timeline's picture: drawn from a small synthetic trace, and clear errors for bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hvd_order.base.errors import InvalidUsage
from hvd_order.planning.report.timeline import draw_timeline
from hvd_order.planning.report.trace_file import read_trace

Event = dict[str, Any]


def complete(name: str, category: str, begin_us: float, end_us: float, **args: int) -> Event:
    return {
        "ph": "X",
        "pid": args.pop("rank", 0),
        "tid": 1,
        "name": name,
        "cat": category,
        "ts": begin_us,
        "dur": end_us - begin_us,
        "args": args,
    }


def synthetic_trace(slices: int, steps: int, rank: int = 0) -> list[Event]:
    # ms       0        10                   30   31        41
    # thread   forward  backward             step forward   ...
    # link                 last slice ... first slice, half of them in the next forward
    events: list[Event] = [
        {"ph": "M", "pid": rank, "tid": 1, "name": "thread_name", "args": {"name": "training"}}
    ]
    period_us, forward_us, backward_us = 31e3, 10e3, 20e3
    link_free_us = 0.0
    for step in range(steps):
        begin = step * period_us
        spans = {
            "forward": (begin, begin + forward_us),
            "backward": (begin + forward_us, begin + forward_us + backward_us),
            "step": (begin + forward_us + backward_us, begin + period_us),
        }
        for name, (first, last) in spans.items():
            events.append(complete(name, "compute", first, last, rank=rank))
        events.append(complete("embedding", "wait", begin, begin + 1e3, rank=rank))
        events.append(complete("update", "update", begin + 1e3, begin + 2e3, rank=rank, tensors=4))
        ready = {
            number: begin + forward_us + backward_us * (slices - number) / slices
            for number in range(slices)
        }
        waiting = dict(ready)
        while waiting:
            link_free_us = max(link_free_us, min(waiting.values()))
            number = min(s for s, at in waiting.items() if at <= link_free_us)
            done = link_free_us + 25e3 / slices
            what = {
                "slice": number,
                "priority": number,
                "bytes": 1 << 18,
                "model": 0,
                "step": step,
                "rank": rank,
            }
            name = f"blocks.{number * 4 // slices}.mlp_in.weight[slice {number}]"
            events.append(complete(name, "queue", waiting.pop(number), link_free_us, **what))
            events.append(complete(name, "transfer", link_free_us, done, **what))
            link_free_us = done
    return events


def write(path: Path, events: object) -> Path:
    path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
    return path


@pytest.mark.parametrize(("slices", "steps"), [(1, 1), (7, 4), (100, 3)])
def test_picture_is_drawn(tmp_path: Path, slices: int, steps: int) -> None:
    image = pytest.importorskip("matplotlib.image")
    trace = write(tmp_path / "trace.json", synthetic_trace(slices, steps))
    picture = tmp_path / "new" / "timeline.png"

    draw_timeline(trace, picture)

    pixels = image.imread(picture)
    assert pixels.shape[0] > 400
    assert pixels.shape[1] > 1200
    colours = {tuple(pixel) for pixel in pixels[::3, ::3, :3].reshape(-1, 3).round(2).tolist()}
    assert len(colours) > 20, "the picture is all but empty"


def test_picture_without_compute_marks(tmp_path: Path) -> None:
    events = [e for e in synthetic_trace(5, 2) if e.get("cat") != "compute"]
    picture = tmp_path / "timeline.png"
    said = draw_timeline(write(tmp_path / "trace.json", events), picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    known = "rank 0, steps 0 to 1: 10 slices, 2.5 MiB; no forward pass is recorded after them"
    assert said.startswith(known)
    assert said.endswith('mark forward passes by with hvd.timeline_span("forward"):')
    said = draw_timeline(write(tmp_path / "trace.json", synthetic_trace(5, 2)), picture)
    assert said.endswith(
        "2.5 MiB; 2 of them arrive after the next forward has begun; none is recorded after step 1"
    )


def test_each_rank_is_read_apart(tmp_path: Path) -> None:
    both = synthetic_trace(3, 2, rank=0) + synthetic_trace(5, 2, rank=1)
    path = write(tmp_path / "trace.json", both)
    assert read_trace(path).rank == 0
    assert len(read_trace(path, rank=1).transfers) == 10
    with pytest.raises(InvalidUsage, match=r"no events of rank 2, only of ranks \[0, 1\]"):
        read_trace(path, rank=2)


def test_step_that_was_not_recorded(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.json", synthetic_trace(3, 2))
    with pytest.raises(InvalidUsage, match=r"no transfers of steps \[7\]; it holds steps 0 to 1"):
        draw_timeline(path, tmp_path / "timeline.png", steps=[1, 7])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"traceEvents": [', "is not complete JSON"),
        ('{"events": []}', "is no Chrome trace"),
        ('{"traceEvents": []}', "holds no transfers"),
        (
            json.dumps({"traceEvents": [{"ph": "X", "pid": 0, "cat": "wait", "ts": "soon"}]}),
            '"ts" of an event must be a number',
        ),
        (
            json.dumps({"traceEvents": [complete("w", "transfer", 0, 1, slice=0)]}),
            '"priority" of an event must be a whole number',
        ),
    ],
)
def test_bad_trace_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidUsage, match=message):
        draw_timeline(path, tmp_path / "timeline.png")


def test_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidUsage, match=r"cannot read the trace .*nowhere\.json"):
        draw_timeline(tmp_path / "nowhere.json", tmp_path / "timeline.png")
