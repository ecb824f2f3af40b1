"""What is left when a job has ended, in whatever way: nothing."""

from __future__ import annotations

import os
import signal
import sys
import time
import uuid
from pathlib import Path

import pytest
from helpers.launching import (
    Job,
    fake_ssh,
    gone,
    launcher,
    launcher_environment,
    no_process_with,
    write_script,
)
from helpers.processes import arguments_of, environment_of, processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's subreapers")

# Starts a child, one in a session of its own that outlives its parent, and one that ignores polite
# signals. They are found by their last argument. Then it stays, or ends with a code.
BRINGS_UP = """
    import os, signal, subprocess, sys, time
    mark, end = sys.argv[1:]
    sleep = [sys.executable, "-c", "import time; time.sleep(100)", mark]
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    deaf += "print('deaf', flush=True); time.sleep(100)"
    subprocess.Popen(sleep)
    subprocess.Popen(["sh", "-c", 'setsid "$@" & exit 0', "sh", *sleep]).wait()
    child = subprocess.Popen(
        [sys.executable, "-c", deaf, mark], start_new_session=True, stdout=subprocess.PIPE
    )
    child.stdout.readline()
    os.write(1, b"up\\n")
    if end == "stays" or (end != "0" and os.environ["RANK"] == "1"):
        time.sleep(100)
    sys.exit(int(end))
"""


@pytest.fixture
def mark() -> str:
    """An argument that only the processes of this test have."""
    return f"mark-{uuid.uuid4().hex}"


def bring_up(folder: Path, mark: str, end: str, *options: str) -> list[str]:
    return [*launcher(*options), *write_script(folder, BRINGS_UP), mark, end]


@pytest.mark.parametrize("end", [0, 7])
def test_what_ranks_have_started_ends_with_them(tmp_path: Path, mark: str, end: int) -> None:
    with Job(bring_up(tmp_path, mark, str(end), "-np", "2"), launcher_environment()) as job:
        assert job.wait(60) == end, job.text()
        assert no_process_with(mark)


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)]
)
def test_what_ranks_have_started_ends_with_the_launcher(
    tmp_path: Path, mark: str, how: signal.Signals
) -> None:
    own = tmp_path / "tmp"  # other tests may run at this time
    own.mkdir()
    env = launcher_environment({"TMPDIR": str(own)})
    with Job(bring_up(tmp_path, mark, "stays", "-np", "2"), env) as job:
        for _ in range(2):
            job.wait_for("up")
        job.signal(how)
        assert job.wait(60) == (128 + how if how is signal.SIGTERM else -how)
        assert no_process_with(mark)
    assert [name for name in os.listdir(own) if name.startswith("hvd_order")] == []


def test_servers_end_with_a_launcher_that_is_killed(tmp_path: Path, mark: str) -> None:
    program = write_script(tmp_path, "import os, time; os.write(1, b'up\\n'); time.sleep(100)")
    env = launcher_environment({"MARK_OF_THIS_TEST": mark})
    with Job([*launcher("-np", "1", "--servers", "1"), *program], env) as job:
        job.wait_for("up")
        servers = [
            pid
            for pid in processes()
            if "hvd_order.servers.process.process" in arguments_of(pid)
            and environment_of(pid).get("MARK_OF_THIS_TEST") == mark
        ]
        assert servers
        job.signal(signal.SIGKILL)
        job.wait(30)
        for server in servers:
            assert gone(server)


def test_a_rank_gets_signals_and_input_as_without_a_launcher(tmp_path: Path) -> None:
    source = """
        import os, signal, sys
        signal.signal(signal.SIGUSR1, lambda *_: sys.exit(5))
        assert signal.getsignal(signal.SIGPIPE) == signal.SIG_IGN  # Python's own choice
        os.write(1, f"pid {os.getpid()} {os.getppid()} {sys.stdin.read()!r}\\n".encode())
        signal.pause()
    """
    with Job(
        [*launcher("-np", "1"), *write_script(tmp_path, source)], launcher_environment()
    ) as job:
        above = int(job.wait_for(r"pid \d+ (\d+) ''")[1])
        os.kill(above, signal.SIGUSR1)  # whoever takes the process above for the rank
        assert job.wait(60) == 5, job.text()


# ---- a second Ctrl-C

DEAF = """
    import os, signal, time
    def hear(number, frame):
        os.write(1, b"heard\\n")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, hear)
    os.write(1, b"up\\n")
    while True:
        time.sleep(100)
"""


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["-np", "2"], id="one host"),
        pytest.param(["-np", "2", "--servers", "1"], id="servers"),
        pytest.param(["-np", "2", "--min-np", "1"], id="elastic", marks=pytest.mark.long),
        pytest.param(["-H", "hostA:1,hostB:1"], id="hosts", marks=pytest.mark.long),
    ],
)
def test_a_second_ctrl_c_does_not_wait(tmp_path: Path, mark: str, options: list[str]) -> None:
    path, _ = fake_ssh(tmp_path)
    command = [*launcher(*options), *write_script(tmp_path, DEAF), mark]
    with Job(command, launcher_environment(path)) as job:
        for _ in range(2):
            job.wait_for("up")
        job.signal(signal.SIGINT)
        for _ in range(2):
            job.wait_for("heard")
        begin = time.monotonic()
        job.signal(signal.SIGINT)
        assert job.wait(30) == 128 + signal.SIGINT, job.text()
        assert time.monotonic() - begin < 8.0
        assert no_process_with(mark)
        assert not job.matches("Traceback")
