"""The ranks' output: whole lines with their rank, from pipes that real processes write to."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from hvd_order.launch.jobs import lines
from hvd_order.launch.jobs.lines import STDERR, STDOUT, Source
from hvd_order.launch.jobs.rank_output import RankOutput
from hvd_order.launch.request import OutputRules

pytestmark = pytest.mark.usefixtures("fresh_console")
CapFd = pytest.CaptureFixture[str]


@pytest.fixture
def fresh_console() -> None:
    lines._console._unfinished.clear()  # of a test before


def write(output: RankOutput, scripts: list[str]) -> None:
    """Runs a shell script a rank, and waits for all. Keeps the files open, as torch does."""
    running, kept = [], []
    for rank, script in enumerate(scripts):
        files = [
            open(output.open(rank, len(scripts), to), "w")  # noqa: SIM115
            for to in (STDOUT, STDERR)
        ]
        running.append(subprocess.Popen(["sh", "-c", script], stdout=files[0], stderr=files[1]))
        kept += files
    output.begin()
    assert [each.wait() for each in running] == [0] * len(scripts)
    output.finish()
    for file in kept:
        file.close()


def test_lines_are_whole_and_have_their_rank(capfd: CapFd) -> None:
    script = "i=0; while [ $i -lt 200 ]; do printf part; echo =$i=%d; i=$((i+1)); done"
    write(RankOutput(OutputRules()), [script % rank for rank in range(3)])
    said = capfd.readouterr()
    assert said.err == ""
    for rank in range(3):
        own = [line for line in said.out.splitlines() if line.startswith(f"[{rank}] ")]
        assert own == [f"[{rank}] part={i}={rank}" for i in range(200)]


def test_several_hosts_have_names_and_times_can_be_asked_for(capfd: CapFd) -> None:
    write(RankOutput(OutputRules(timestamps=True), "me@node2"), ["echo out; echo err >&2"])
    said = capfd.readouterr()
    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}"
    assert re.fullmatch(rf"{stamp} \[node2:0\] out\n", said.out)
    assert re.fullmatch(rf"{stamp} \[node2:0\] err\n", said.err)


def test_text_without_a_line_end_is_written_when_a_rank_ends(capfd: CapFd) -> None:
    write(RankOutput(OutputRules()), ["printf last; printf words >&2"])
    assert capfd.readouterr() == ("[0] last\n", "[0] words\n")


def test_without_prefix_every_byte_is_the_rank_s(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    output = RankOutput(OutputRules(prefix=False))
    write(output, [r"printf '\000\377\r\n\nx'"])
    assert capfdbinary.readouterr().out == b"\x00\xff\r\n\nx"


def test_files_have_what_the_rank_wrote(tmp_path: Path, capfd: CapFd) -> None:
    output = RankOutput(OutputRules(folder=tmp_path))
    for word in ("first", "second"):
        write(output, [f"echo {word}", "printf oh >&2"])
    assert capfd.readouterr().out == "[0] first\n[0] second\n"
    assert (tmp_path / "rank.0" / "stdout").read_text() == "first\n"
    assert (tmp_path / "rank.0" / "stdout.1").read_text() == "second\n"
    assert (tmp_path / "rank.1" / "stderr").read_text() == "oh"


def test_what_keeps_a_pipe_open_does_not_keep_the_launcher(capfd: CapFd) -> None:
    output = RankOutput(OutputRules())
    write(output, ["sleep 60 & echo $!"])
    pid = capfd.readouterr().out.split()[1]
    os.kill(int(pid), 0)  # it still runs
    os.kill(int(pid), 9)


def test_a_prompt_is_seen_and_another_line_does_not_run_into_it(capfd: CapFd) -> None:
    one, other = Source(STDOUT, "[0]"), Source(STDOUT, "[1]")
    one.feed(b"name? ")
    assert one.holds_since() is not None
    one.flush()
    other.feed(b"line\n")
    one.feed(b"answer\n")
    assert capfd.readouterr().out == "[0] name? \n[1] line\n[0] answer\n"
    one.feed(b"a")
    one.flush()
    one.feed(b"b\nc\n")
    assert capfd.readouterr().out == "[0] ab\n[0] c\n"


def test_lines_from_another_host_keep_the_label_that_they_came_with(capfd: CapFd) -> None:
    one, other = Source(STDOUT), Source(STDOUT)
    one.feed(b"[a:0] x\n[a:1] wor")
    one.flush()
    other.feed(b"[b:2] line\n")
    one.feed(b"ds\nend\n")
    assert capfd.readouterr().out == "[a:0] x\n[a:1] wor\n[b:2] line\n[a:1] ds\nend\n"


def test_progress_bars_keep_their_carriage_returns(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    bar = Source(STDERR, "[0]")
    bar.feed(b"\r10%")
    bar.flush()
    bar.feed(b"\r20%\r30%\n")
    assert capfdbinary.readouterr().err == b"\r[0] 10%\r[0] 20%\r[0] 30%\n"
    dos = Source(STDOUT, "[0]")
    for part in (b"one\r", b"\ntwo\r\n"):
        dos.feed(part)
    assert capfdbinary.readouterr().out == b"[0] one\r\n[0] two\r\n"


def test_a_line_without_end_does_not_fill_the_memory(capfd: CapFd) -> None:
    endless = Source(STDOUT, "[0]")
    for _ in range(40):
        endless.feed(b"x" * 65536)
    assert len(capfd.readouterr().out) > 1 << 20
    endless.end()
    assert capfd.readouterr().out.endswith("x\n")


def test_output_that_nobody_reads_ends_no_job(capfd: CapFd) -> None:
    reader, writer = os.pipe()
    saved = os.dup(STDOUT)
    os.dup2(writer, STDOUT)
    os.close(writer)
    os.close(reader)
    try:
        Source(STDOUT, "[0]").feed(b"x\n")
        Source(STDOUT, "[0]").feed(b"x\n")
    finally:
        os.dup2(saved, STDOUT)
        os.close(saved)
    assert capfd.readouterr().err == (
        "hvd-order: standard output cannot be written (Broken pipe); the job goes on without it\n"
    )
