"""What `hvd-order top` draws and `hvd-order doctor --job` sums up, for many ranks."""

from __future__ import annotations

import dataclasses
import io
import time

import pytest
from helpers.step_reports import report_of
from rich.console import Console

from hvd_order.base.errors import NotTrusted
from hvd_order.watch.channel.notes import JobNote, PlaceNote, ReportNote, opened, signed
from hvd_order.watch.cli import places
from hvd_order.watch.cli.screen import Screen

KEY = b"k" * 32
RANKS = 50
JOB = JobNote(time.time(), [f"node{rank // 8}" for rank in range(RANKS)], list(range(RANKS)))


def report() -> ReportNote:
    return ReportNote.from_reports(time.time(), {"SGD 0": report_of(0, RANKS)})


def drawn(width: int, height: int) -> str:
    console = Console(
        file=io.StringIO(), force_terminal=True, width=width, height=height, record=True
    )
    with Screen("node0:29500", JOB, console).live() as update:
        update(report(), "")
    return console.export_text()


@pytest.mark.parametrize("width", [80, 140])
def test_the_slow_rank_shows_and_all_fits_the_terminal(width: int) -> None:
    lines = drawn(width, 24).rstrip().splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "50 ranks on 7 hosts" in text
    assert "Rank 1 on node0 holds up the others" in text
    assert any(line.split()[:2] == ["1", "node0"] for line in lines)
    assert "more ranks" in text


def test_a_record_is_for_its_place_its_key_and_its_form() -> None:
    content = report().content()
    text = signed(KEY, "a/report", content).encode()
    assert ReportNote.of(opened(KEY, "a/report", text)).stats == report().stats
    for key, name in ((b"x" * 32, "a/report"), (KEY, "b/report")):
        with pytest.raises(NotTrusted):
            opened(key, name, text)
    with pytest.raises(NotTrusted, match="another version"):
        JobNote.of(content)
    other = dataclasses.replace(report(), stats={"SGD 0": [{"unknown": 1}]}).content()  # type: ignore[arg-type,dict-item]
    with pytest.raises(NotTrusted, match="another version"):
        ReportNote.of(other)


def test_the_odd_rank_stands_out() -> None:
    waits = PlaceNote("train.py:3 main", "waits in the collective loss", {"MainThread": ["a"]})
    loads = PlaceNote("data.py:9 load", "", {"MainThread": ["b"]})
    found = {rank: loads if rank == 3 else waits for rank in range(6)}
    lines = places._summary(found, {6: "py-spy ..."})
    assert lines[0] == "ranks 0-2, 4-5: train.py:3 main, and waits in the collective loss"
    assert set(lines[1:3]) == {"rank 3: data.py:9 load", "rank 6: give no answer"}
    assert lines[3] == "The others may wait for ranks 3, 6: look there first."
    assert len(places._summary({0: loads, 1: loads}, {})) == 1  # nobody waits
