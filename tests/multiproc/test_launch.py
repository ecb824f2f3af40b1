"""``hvd-order run`` as a user starts it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from helpers.ranks import REPOSITORY

TRAIN = """
    import os, sys, torch, hvd_order.torch as hvd
    hvd.init()
    total = int(hvd.allreduce(torch.tensor(hvd.rank() + 1), op=hvd.Sum))
    place = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), total)
    get = os.environ.get
    sys.stdout.write(f"{place} {get('HVD_ORDER_TIMELINE')} {get('COLOUR')}\\n")
    sys.stdout.flush()
"""


def launcher(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "hvd_order.cli", "run", *arguments]


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def launch(folder: Path, source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(textwrap.dedent(source), encoding="utf-8")
    return subprocess.run(
        [*launcher(*arguments), sys.executable, str(script)],
        env=environment(),
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
        env=environment(),
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
        assert _gone(worker)


def _gone(pid: int) -> bool:
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False
