"""``hvd-order run`` as a user starts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
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
from helpers.training.scripts import trains_a_layer

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


def test_ranks_find_each_other_and_options_reach_them(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    done = launch(
        tmp_path, TRAIN, "-H", "localhost:3", "--timeline-filename", str(tmp_path / "t.json"),
        "-x", "COLOUR=a=b",
        # PyTorch makes a folder for its compiler when Dynamo is imported.
        env={"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"[{r}] ({r}, 3, {r}, 3, 6) {tmp_path / 't.json'} a=b" for r in range(3)
    ]
    assert done.stderr == ""
    assert list(temporary.iterdir()) == []


def test_arguments_arrive_as_they_are(tmp_path: Path) -> None:
    wanted = ["a$$b", "${local_rank}", "$local_rank", "$", "$$", "\\$x", "*", "a b", "", "'\"", "é"]
    program = write_script(tmp_path, "import json, sys; print(json.dumps(sys.argv[1:]))")
    done = subprocess.run(
        [*launcher("-np", "1", "--no-prefix"), *program, *wanted],
        env=launcher_environment(), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == wanted


def test_the_timeline_that_was_asked_for_is_written(tmp_path: Path) -> None:
    path = tmp_path / "traces" / "t.json"
    done = launch(
        tmp_path,
        trains_a_layer() + "optimizer.flush()\nhvd.shutdown()\n",
        "-np", "2", "--timeline-filename", str(path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    events = json.loads(path.read_text("utf-8"))["traceEvents"]
    transfers = [event for event in events if event.get("cat") == "transfer"]
    assert len({event["args"]["step"] for event in transfers}) >= 2, transfers


def test_the_rank_that_ended_by_itself_is_named_not_one_that_was_stopped(tmp_path: Path) -> None:
    done = launch(
        tmp_path,
        """
        import os, signal, sys, time
        if os.environ["RANK"] == "0":
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
            time.sleep(100)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)
        """,
        "-np",
        "2",
    )
    assert done.stderr == "hvd-order: rank 1 was ended by SIGTERM; all others were stopped\n"
    assert done.returncode == 128 + signal.SIGTERM


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


SLEEP = "import os, time; os.write(1, f'pid {os.getpid()}\\n'.encode()); time.sleep(100)"


def test_a_job_under_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    go = tmp_path / "go"
    source = f"""
        import os, time
        os.write(1, b"up\\n")
        while not os.path.exists({str(go)!r}):
            time.sleep(0.05)
    """
    command = ["nohup", *launcher("-np", "1"), *write_script(tmp_path, source)]
    with Job(command, launcher_environment()) as job:
        job.wait_for("up")
        job.signal(signal.SIGHUP)  # what the terminal sends when it closes
        go.touch()
        assert job.wait() == 0, job.text()


def test_output_goes_to_a_file_a_rank(tmp_path: Path) -> None:
    source = "import os, sys; print('out', os.environ['RANK']); sys.stderr.write('err')"
    done = launch(tmp_path, source, "-np", "2", "--output-filename", str(tmp_path / "logs"))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] out 0", "[1] out 1"]
    assert sorted(done.stderr.splitlines()) == ["[0] err", "[1] err"]
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
    text = f"{place} {get('SECRET')} {get('COLOUR')} {get('HOME')} {os.getcwd()}\\n"
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
    told = f"do-not-show hidden-too {tmp_path} {os.getcwd()}"  # HOME is that of the other login
    assert sorted(done.stdout.splitlines()) == [
        f"[hostA:1] (1, 3, 0, 2, 6) {told}",
        f"[hostA:2] (2, 3, 1, 2, 6) {told}",
        f"[hostB:0] (0, 3, 0, 1, 6) {told}",
    ]
    assert done.stderr == ""
    calls = log.read_text()
    assert calls.count("-p 2222 -i /a/key") == 2
    assert calls.count("ServerAliveInterval") == 2, "a host without power closes no connection"
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


def test_a_job_whose_output_nobody_reads_any_more_goes_on(tmp_path: Path) -> None:
    path, _ = fake_ssh(tmp_path)
    source = f"""
        import os, time
        os.write(1, b"first\\n")
        for _ in range(100):
            os.write(1, b"x" * 9999 + b"\\n")
        open({str(tmp_path)!r} + "/done" + os.environ["RANK"], "w")
    """
    command = [*launcher("-H", "hostA:1,hostB:1"), *write_script(tmp_path, source)]
    with subprocess.Popen(
        command, env=launcher_environment(path), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert b"first" in running.stdout.readline()
        running.stdout.close()  # as head does
        try:
            running.wait(timeout=60)
        finally:
            running.terminate()
        error = running.stderr.read().decode()
    assert running.returncode == 0, error
    assert {"done0", "done1"} <= set(os.listdir(tmp_path))
    assert "Traceback" not in error


def test_a_progress_bar_is_seen_while_it_moves(tmp_path: Path) -> None:
    path, _ = fake_ssh(tmp_path)
    go = tmp_path / "go"
    source = f"""
        import os, time
        for percent in (10, 20, 30):
            os.write(2, b"\\r%d%%" % percent)
        while not os.path.exists({str(go)!r}):
            time.sleep(0.05)
    """
    command = [*launcher("-H", "hostA:1,hostB:1"), *write_script(tmp_path, source)]
    with Job(command, launcher_environment(path)) as job:
        job.wait_for(r"\[hostA:0\] 10%", timeout=60)
        go.touch()
        assert job.wait() == 0


def test_a_host_that_cannot_be_reached_is_named_with_the_reason(tmp_path: Path) -> None:
    path, _ = fake_ssh(tmp_path)
    done = launch(tmp_path, "", "-H", "hostA:1,unreachable:1", env=path)
    assert done.returncode == 1
    assert "nothing could be started on unreachable (exit code 255)" in done.stderr
    assert "No route to host; 'ssh unreachable" in done.stderr


def test_a_host_that_never_answers_is_waited_for_as_long_as_told(tmp_path: Path) -> None:
    path, _ = fake_ssh(tmp_path)
    many = {f"LONG{i}": "x" * 100_000 for i in range(2)}  # more than a pipe holds
    command = [*launcher("-H", "silent:1", "--start-timeout", "2"), "true"]
    with Job(command, launcher_environment(path | many)) as job:
        job.wait_for("silent did not answer in time", timeout=30)
        assert job.wait(timeout=20) == 1


@pytest.mark.parametrize(
    ("options", "how"),
    [
        (["-np", "2"], signal.SIGINT),
        (["-H", "hostA:1,hostB:1"], signal.SIGINT),
        (["-H", "hostA:1,hostB:1"], signal.SIGKILL),
    ],
)
def test_when_the_launcher_ends_so_do_all_ranks(
    tmp_path: Path, options: list[str], how: signal.Signals
) -> None:
    path, _ = fake_ssh(tmp_path)
    nohup = ["nohup"] if how is signal.SIGKILL else []  # must not keep the workers from ending
    command = [*nohup, *launcher(*options), *write_script(tmp_path, SLEEP)]
    with Job(command, launcher_environment(path)) as job:
        workers = [int(job.wait_for(r"pid (\d+)")[1]) for _ in range(2)]
        job.signal(how)
        assert job.wait() == (-how if how is signal.SIGKILL else 128 + how)
    for worker in workers:
        assert gone(worker)
    assert not job.matches("hvd_order/"), "no traceback of the launcher itself"
