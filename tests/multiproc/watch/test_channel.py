"""`hvd-order top` and `hvd-order doctor --job`, as a user runs them beside a job of two ranks."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.flags import raise_flag, wait_until
from helpers.launching import run_cli
from helpers.ranks import REPOSITORY, Script, run_script, start_script
from helpers.step_reports import stats_of

# Rank 1 comes late to the second collective, as one that loads data.
PROGRAM = """
import sys
import hvd_order.torch as hvd
import torch
from helpers.flags import await_flag
from helpers.step_reports import report_of
from hvd_order.engine.account.reports import publish
hvd.init()
print("begun", flush=True)
await_flag(sys.argv[1] + ".publish", 100)
publish(report_of(hvd.rank(), hvd.size()))
def load_data():
    await_flag(sys.argv[1] + ".load", 100)
if hvd.rank() == 1:
    load_data()
hvd.allreduce(torch.ones(3), name="the_late_one")
hvd.shutdown()
"""


class Beside:
    """A job, and a user's shell on its host."""

    def __init__(self, script: Script, flags: str, env: dict[str, str]) -> None:
        self.script = script
        self.flags = flags
        self.env = env

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run_cli(*arguments, env=self.env, timeout=100)


def shell(folder: Path, **more: str) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("HVD_ORDER")}
    return env | {"XDG_RUNTIME_DIR": str(folder), "PYTHONPATH": str(REPOSITORY)} | more


def seen_live(number: str, env: dict[str, str]) -> str:
    """What `hvd-order top` draws on a terminal, until Ctrl-C."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 110, 0, 0))
    command = [sys.executable, "-m", "hvd_order.tools.cli", "top", number]
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env={**env, "TERM": "xterm-256color"}
    ) as process:
        os.close(theirs)
        drawn = b""
        while b"holds up" not in drawn:
            drawn += os.read(ours, 4096)  # the timeout of the test limits it
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # as Linux says that the other end is closed
            while more := os.read(ours, 4096):
                drawn += more
    os.close(ours)
    assert process.returncode == 0
    return drawn.decode()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Beside]:
    flags = str(tmp_path / "flag")
    with start_script(2, PROGRAM, flags, env={"XDG_RUNTIME_DIR": str(tmp_path)}) as script:
        for rank in range(2):
            script.wait_for_output(rank, "begun")
        yield Beside(script, flags, shell(tmp_path))


@pytest.mark.timeout(300)
def test_a_job_from_its_first_report_to_its_end(job: Beside, tmp_path: Path) -> None:
    number = str(job.script.pids[0])  # other jobs may run on this host
    early = job.run("top", number, "--json")
    assert early.returncode == 1, early.stderr
    assert "has no report yet" in early.stderr

    raise_flag(f"{job.flags}.publish")
    wait_until(lambda: job.run("top", number, "--json").returncode == 0, "a report can be seen")
    document = json.loads(job.run("top", number, "--json").stdout)
    assert document["processes"] == job.script.pids
    optimizer = document["optimizers"]["SGD 0"]
    assert optimizer["slow_cause"] == "loader"
    assert optimizer["ranks"] == {str(rank): stats_of(rank).as_dict() for rank in range(2)}

    drawn = job.run("top", document["store"]).stdout
    assert "2 ranks on 1 host" in drawn
    assert "holds up the others by 100 ms a step: loader" in " ".join(drawn.split())

    live = seen_live(number, job.env)
    assert "Rank 1 on" in live
    assert "\x1b[?1049l" in live  # the terminal is as it was

    # Somebody who reaches the store, without the key.
    stranger = shell(tmp_path / "elsewhere")
    unknown = run_cli("top", document["store"], "--json", env=stranger, timeout=100)
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert "is not known here. Run this command on the host of its rank 0" in unknown.stderr
    wrong = run_cli(
        "top", document["store"], "--json", env={**stranger, "HVD_ORDER_SECRET": "00" * 32},
        timeout=100,
    )  # fmt: skip
    assert wrong.returncode == 2
    assert "not signed with the secret of this job" in wrong.stderr

    looked = job.run("doctor", "--job", number)
    assert looked.returncode == 0, looked.stdout + looked.stderr
    assert "rank 1: " in looked.stdout
    assert "script.py" in looked.stdout.split("rank 0: ")[1].splitlines()[0]
    assert " load_data" in looked.stdout.split("rank 1 on ")[1]
    assert "allreduce" in looked.stdout.split("rank 0 on ")[1]

    (file,) = (tmp_path / "hvd_order").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    raise_flag(f"{job.flags}.load")
    assert [end.returncode for end in job.script.wait()] == [0, 0]
    assert not list((tmp_path / "hvd_order").iterdir())
    gone = job.run("top", document["store"], "--json")
    assert gone.returncode != 0
    unknown = job.run("top", number, "--json")
    assert unknown.returncode == 2
    assert "Name a job by the process id of its rank 0" in unknown.stderr


@pytest.mark.timeout(200)
def test_a_rank_that_is_stopped_is_named_with_what_to_do(job: Beside) -> None:
    number = str(job.script.pids[0])
    job.script.kill(1, signal.SIGSTOP)
    try:
        env = {**job.env, "PATH": "/nonexistent"}  # without py-spy
        looked = run_cli("doctor", "--job", number, "--timeout", "4", env=env, timeout=100)
        assert looked.returncode == 1, looked.stderr
        assert "rank 1: give no answer" in looked.stdout
        assert f"pip install py-spy, then: py-spy dump --pid {job.script.pids[1]}" in looked.stdout
        assert "await_flag" in looked.stdout.split("rank 0 on ")[1]
    finally:
        job.script.kill(1, signal.SIGCONT)


NOT_WATCHED = """
import os, threading
import hvd_order.torch as hvd
hvd.init()
print([thread.name for thread in threading.enumerate() if "watch" in thread.name])
print(os.path.exists(os.environ["XDG_RUNTIME_DIR"] + "/hvd_order"))
"""


def test_a_job_that_is_not_to_be_seen_leaves_nothing(tmp_path: Path) -> None:
    env = {"XDG_RUNTIME_DIR": str(tmp_path), "HVD_ORDER_WATCH": "0"}
    for end in run_script(2, NOT_WATCHED, env=env):
        assert end.stdout.split() == ["[]", "False"], end.stderr
