"""The report about a timeline of all ranks, from small traces whose causes are known."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from hvd_order.planning.report.trace.content import report_of, text_of
from hvd_order.planning.report.trace.exposed import ExposedWait, Meanwhile, exposed_waits
from hvd_order.planning.report.trace.page import page_of
from hvd_order.planning.report.trace.suggestions import suggest
from hvd_order.planning.report.trace_file import TracedJob, read_job_trace
from hvd_order.tools.cli.main import main

Event = dict[str, Any]


def span(rank: int, name: str, category: str, begin: float, end: float, **args: Any) -> Event:
    return {
        "ph": "X", "pid": rank, "tid": 1, "name": name, "cat": category,
        "ts": begin, "dur": end - begin, "args": args,
    }  # fmt: skip


def slice_of(
    rank: int, number: int, ready: float, issued: float, done: float, step: int = 0, kib: int = 64
) -> list[Event]:
    about = {"slice": number, "priority": number, "bytes": kib << 10, "model": 0, "step": step}
    name = f"layer{number}.weight"
    return [
        span(rank, name, "queue", ready, issued, **about),
        span(rank, name, "transfer", issued, done, **about),
    ]


def wait(rank: int, number: int, begin: float, end: float, step: int = 0) -> Event:
    name = f"layer{number}.weight"
    return span(rank, name, "wait", begin, end, model=0, tensor=number, slices=[number], step=step)


def job(tmp_path: Path, events: Sequence[Event]) -> TracedJob:
    path = tmp_path / "trace.json"
    about = {"clock_error_us": 0.5}
    path.write_text(json.dumps({"traceEvents": list(events), "otherData": about}), "utf-8")
    return read_job_trace(path)


def only(waits: Sequence[ExposedWait]) -> ExposedWait:
    (one,) = waits
    return one


def test_a_late_rank_is_blamed(tmp_path: Path) -> None:
    ready = (10.0, 13.0, 10.0)
    events = [e for r in range(3) for e in slice_of(r, 0, ready[r], 13, 15)]
    one = only(exposed_waits(job(tmp_path, [*events, wait(0, 0, 11, 15)])))
    assert one.parts is not None
    assert (one.parts.late, one.parts.queue, one.parts.transfer) == (2, 0, 2)
    assert one.late_rank == 1


def test_what_was_sent_meanwhile_is_blamed_and_an_inversion_is_told(tmp_path: Path) -> None:
    events = []
    for rank in range(2):
        events += slice_of(rank, 1, 10, 14, 16)
        events += slice_of(rank, 2, 5, 8, 13)  # less urgent
        events += slice_of(rank, 0, 9, 13, 14)
    one = only(exposed_waits(job(tmp_path, [*events, wait(1, 1, 11, 16)])))
    assert one.parts is not None
    assert (one.parts.late, one.parts.queue, one.parts.transfer) == (0, 3, 2)
    assert one.meanwhile == (
        Meanwhile("layer2.weight", 2.0, True),
        Meanwhile("layer0.weight", 1.0, False),
    )


def steps(slow: float, count: int = 5) -> list[Event]:
    """Two ranks of three layers; rank 1 takes ``slow`` times as long. Times in microseconds."""
    events = []
    period = 30_000 * slow + 12_000
    for step in range(count):
        begin = step * period
        for rank, factor in ((0, 1.0), (1, slow)):
            forward, backward = begin + 10_000 * factor, begin + 30_000 * factor
            events.append(span(rank, "forward", "compute", begin, forward))
            events.append(span(rank, "backward", "compute", forward, backward))
            for number in (2, 1, 0):
                ready = forward + (backward - forward) * (2 - number) / 2
                sent = begin + 10_000 * slow + 10_000 * slow * (2 - number)
                events += slice_of(rank, number, ready, sent, sent + 8_000, step, kib=1024)
            events.append(wait(rank, 0, backward, begin + 30_000 * slow + 8_000, step))
    return events


def test_a_slow_rank_is_the_first_suggestion(tmp_path: Path) -> None:
    outcome = suggest(job(tmp_path, steps(slow=2.0)))
    first = outcome.best[0]
    assert first.text == "rank 1 computes as fast as the next slowest"
    assert first.gain_s == pytest.approx(30e-3, rel=0.25)
    assert outcome.measured_s == pytest.approx(72e-3)
    assert outcome.simulated_s == pytest.approx(72e-3, rel=0.25)
    even = suggest(job(tmp_path, steps(slow=1.0)))
    assert all("rank 1" not in each.text for each in even.best)
    assert 0 < len(even.best) <= 3


class _Page(HTMLParser):
    """Tags of a page, and everything that it would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_the_page_has_what_the_text_has_and_loads_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = steps(slow=2.0)
    for event in events:
        event["name"] = event["name"].replace("layer0", "<b>&")
    report = report_of(job(tmp_path, events), "trace.json")
    text, page = text_of(report), page_of(report)
    assert "<b>&" in text
    assert "&lt;b&gt;&amp;" in page
    parsed = _Page(page)
    names = [tag for tag, _ in parsed.tags]
    assert names.count("table") == names.count("caption") == len(report.tables) == 3
    assert not {"script", "img", "iframe", "b"} & set(names)
    for _, attributes in parsed.tags:
        assert "src" not in attributes
        assert attributes.get("href", "data:,") == "data:,"
    assert "url(" not in page
    assert "@import" not in page
    heads = [attributes for tag, attributes in parsed.tags if tag == "th"]
    assert all("scope" in attributes for attributes in heads)
    files = str(tmp_path / "trace.json"), "--html", str(tmp_path / "page.html")
    assert main(["report", *files]) == 0
    assert capsys.readouterr().out == text + f"\n{tmp_path / 'page.html'}\n"
    assert (tmp_path / "page.html").read_text("utf-8") == page


def test_parts_of_layers_and_of_waits_close(tmp_path: Path) -> None:
    trace = job(tmp_path, steps(slow=1.5))
    for each in exposed_waits(trace):
        assert each.parts is not None
        assert each.parts.exposed == pytest.approx(each.us)
    report = report_of(trace, "trace.json")
    for bar in report.bars:
        assert bar.late + bar.queue + bar.transfer + bar.unknown == bar.total
    said = re.search(r"Exposed communication: ([\d.]+) ms", " ".join(report.facts))
    assert said is not None
    assert float(said[1]) == pytest.approx(sum(bar.total for bar in report.bars), abs=0.01)


def test_one_rank_alone_says_what_is_missing(tmp_path: Path) -> None:
    events = [e for e in steps(slow=1.0) if e["pid"] == 0]
    text = text_of(report_of(job(tmp_path, events), "trace.json"))
    assert "record all ranks into one file" in text
    assert "No suggestion: a simulation needs" in text
