"""``hvd-order run`` as a user starts it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.launching import (
    Job,
    fake_ssh,
    gone,
    launcher,
    launcher_environment,
    write_script,
)

TRAIN = """
    import os, sys, torch, hvd_order.torch as hvd
    hvd.init()
    total = int(hvd.allreduce(torch.tensor(hvd.rank() + 1), op=hvd.Sum))
    place = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), total)
    get = os.environ.get
    sys.stdout.write(f"{place} {get('HVD_ORDER_TIMELINE')} {get('COLOUR')}\\n")
    sys.stdout.flush()
"""


def launch(
    folder: Path, source: str, *arguments: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*launcher(*arguments), *write_script(folder, source)],
        env=launcher_environment(env),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("size", [1, 2, 3])
def test_run_starts_ranks_that_find_each_other(tmp_path: Path, size: int) -> None:
    done = launch(tmp_path, TRAIN, "-np", str(size))
    assert done.returncode == 0, done.stderr
    total = size * (size + 1) // 2
    wanted = [f"({r}, {size}, {r}, {size}, {total}) None None" for r in range(size)]
    assert sorted(done.stdout.splitlines()) == wanted
    assert done.stderr == ""


def test_options_reach_the_processes(tmp_path: Path) -> None:
    done = launch(
        tmp_path,
        TRAIN,
        "-H",
        "localhost:2",
        "--timeline-filename",
        str(tmp_path / "t.json"),
        "-x",
        "COLOUR=a=b",
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"({r}, 2, {r}, 2, 3) {tmp_path / 't.json'} a=b" for r in range(2)
    ]


def test_the_first_failure_decides_the_exit_code(tmp_path: Path) -> None:
    done = launch(
        tmp_path,
        """
        import os, sys, time
        if os.environ["RANK"] == "1":
            sys.exit(7)
        time.sleep(100)
        """,
        "-np",
        "2",
    )
    assert done.returncode == 7
    assert done.stderr == "hvd-order: rank 1 failed with exit code 7; all others were stopped\n"


def test_a_killed_rank_is_named_with_its_signal(tmp_path: Path) -> None:
    done = launch(
        tmp_path,
        """
        import os, signal, time
        if os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(100)
        """,
        "-np",
        "2",
    )
    assert done.returncode == 128 + 9
    assert "rank 0 was ended by SIGKILL" in done.stderr


def test_ctrl_c_ends_all(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, time\n"
        "sys.stdout.write(f'{os.getpid()}\\n'); sys.stdout.flush()\n"
        "time.sleep(100)\n",
        encoding="utf-8",
    )
    with subprocess.Popen(
        [*launcher("-np", "2"), sys.executable, str(script)],
        env=launcher_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        workers = [int(running.stdout.readline()) for _ in range(2)]
        running.send_signal(signal.SIGINT)
        assert running.wait(timeout=60) == 128 + signal.SIGINT
        assert "hvd_order" not in running.stderr.read(), "no traceback of the launcher itself"
    for worker in workers:
        assert gone(worker)


def test_output_goes_to_a_file_a_rank(tmp_path: Path) -> None:
    source = "import os, sys; print('out', os.environ['RANK']); sys.stderr.write('err')"
    done = launch(tmp_path, source, "-np", "2", "--output-filename", str(tmp_path / "logs"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    for rank in range(2):
        folder = tmp_path / "logs" / f"rank.{rank}"
        assert (folder / "stdout").read_text() == f"out {rank}\n"
        assert (folder / "stderr").read_text() == "err"


# ---- several hosts, behind an ssh that runs everything here ----

HOSTS = """
    import os, sys, torch, hvd_order.torch as hvd
    hvd.init()
    total = int(hvd.allreduce(torch.tensor(hvd.rank() + 1), op=hvd.Sum))
    place = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), total)
    get = os.environ.get
    text = f"{place} {get('SECRET')} {get('COLOUR')} {os.getcwd()}\\n"
    os.write(1, text.encode())
"""


def test_ranks_on_two_hosts_find_each_other_and_no_secret_is_on_a_command_line(
    tmp_path: Path,
) -> None:
    path, log = fake_ssh(tmp_path)
    secret = {"SECRET": "do-not-show"}
    ssh = ["--ssh-port", "2222", "-i", "/a/key"]
    hosts = ["-H", "hostB:1,hostA:2", "--network-interface", "lo"]
    done = launch(tmp_path, HOSTS, *hosts, *ssh, "-x", "COLOUR=hidden-too", env=path | secret)
    assert done.returncode == 0, done.stderr
    here = os.getcwd()
    assert sorted(done.stdout.splitlines()) == [
        f"[hostA] (1, 3, 0, 2, 6) do-not-show hidden-too {here}",
        f"[hostA] (2, 3, 1, 2, 6) do-not-show hidden-too {here}",
        f"[hostB] (0, 3, 0, 1, 6) do-not-show hidden-too {here}",
    ]
    assert done.stderr == ""
    calls = log.read_text()
    assert calls.count("-p 2222 -i /a/key") == 2
    assert "do-not-show" not in calls
    assert "hidden-too" not in calls


def test_the_first_failure_on_any_host_ends_all_and_names_it(tmp_path: Path) -> None:
    path, _ = fake_ssh(tmp_path)
    source = """
        import os, sys, time
        os.write(1, f"pid {os.getpid()}\\n".encode())
        if os.environ["RANK"] == "1":
            sys.exit(7)
        time.sleep(100)
    """
    done = launch(tmp_path, source, "-H", "hostA:1,hostB:1", env=path)
    assert done.returncode == 7
    wanted = "hvd-order: rank 1 on hostB failed with exit code 7; all others were stopped\n"
    assert done.stderr == wanted
    for line in done.stdout.splitlines():
        assert gone(int(line.split()[-1]))


def test_a_host_that_cannot_be_reached_is_named_with_the_reason(tmp_path: Path) -> None:
    path, _ = fake_ssh(tmp_path)
    done = launch(tmp_path, "", "-H", "hostA:1,unreachable:1", env=path)
    assert done.returncode == 1
    assert "nothing could be started on unreachable (exit code 255)" in done.stderr
    assert "No route to host; 'ssh unreachable" in done.stderr


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_when_the_launcher_ends_so_do_all_hosts(tmp_path: Path, how: signal.Signals) -> None:
    path, _ = fake_ssh(tmp_path)
    source = "import os, time; os.write(1, f'pid {os.getpid()}\\n'.encode()); time.sleep(100)"
    command = [*launcher("-H", "hostA:1,hostB:1"), *write_script(tmp_path, source)]
    with Job(command, launcher_environment(path)) as job:
        workers = [int(job.wait_for(r"pid (\d+)")[1]) for _ in range(2)]
        job.signal(how)
        assert job.wait() == (-how if how is signal.SIGKILL else 128 + how)
    for worker in workers:
        assert gone(worker)
