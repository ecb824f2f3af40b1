"""A real Slurm of one node: daemons with a configuration of their own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from helpers.ranks import REPOSITORY, free_port

__all__ = ["NEEDS_SLURM", "Slurm", "wait_until"]

DAEMONS = ("munged", "slurmctld", "slurmd")
_missing = [name for name in DAEMONS if shutil.which(name, path="/usr/sbin:/usr/bin") is None]
NEEDS_SLURM = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(_missing), reason="needs Debian's packages slurm-wlm and munge"),
    pytest.mark.skipif(os.geteuid() != 0, reason="slurmd starts jobs as root only"),
]


def wait_until(true: Callable[[], bool], seconds: float, what: Callable[[], str]) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, what()
        time.sleep(0.2)


class Slurm:
    """A cluster of one node."""

    def __init__(self, folder: Path, daemons: ExitStack) -> None:
        self.folder = folder
        host = socket.gethostname()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        control = folder / "munge.socket"
        for name in ("state", "spool"):
            (folder / name).mkdir()
        settings = folder / "slurm.conf"
        settings.write_text(
            f"ClusterName=test\nSlurmctldHost={host}(127.0.0.1)\nSlurmUser=root\n"
            f"SlurmctldPort={free_port()}\nSlurmdPort={free_port()}\n"
            f"AuthType=auth/munge\nAuthInfo=socket={control}\nCredType=cred/munge\n"
            f"StateSaveLocation={folder}/state\nSlurmdSpoolDir={folder}/spool\n"
            f"SlurmctldPidFile={folder}/slurmctld.pid\nSlurmdPidFile={folder}/slurmd.pid\n"
            "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nMpiDefault=none\n"
            "JobAcctGatherType=jobacct_gather/none\nAccountingStorageType=accounting_storage/none\n"
            "SchedulerType=sched/builtin\nSchedulerParameters=sched_interval=2\n"
            "ReturnToService=2\nMinJobAge=300\nKillWait=60\n"
            f"NodeName={host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} State=UNKNOWN\n"
            f"PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP\n"
        )
        self.environment = {
            **os.environ,
            "SLURM_CONF": str(settings),
            "PATH": f"{Path(sys.executable).parent}:/usr/sbin:{os.environ['PATH']}",
            "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests'}",
            "RANKS_PER_NODE": "2",
            "PORT": str(free_port()),
        }
        munge = [f"--key-file={key}", f"--socket={control}", f"--pid-file={folder}/munged.pid",
                 f"--seed-file={folder}/munge.seed", f"--log-file={folder}/munged.log"]  # fmt: skip
        for command in (
            ["munged", "--foreground", "--force", *munge],
            ["slurmctld", "-D"],
            ["slurmd", "-D"],
        ):
            log = (folder / f"{command[0]}.out").open("w")
            daemon = subprocess.Popen(
                command, env=self.environment, stdout=log, stderr=subprocess.STDOUT
            )
            daemons.callback(self._end, daemon)
            if command[0] == "munged":
                wait_until(control.exists, 20, self.logs)
        wait_until(
            lambda: "idle" in self.call("sinfo", "-h", "-o", "%t", check=False), 60, self.logs
        )

    @staticmethod
    def _end(daemon: subprocess.Popen[bytes]) -> None:
        daemon.terminate()
        try:
            daemon.wait(timeout=20)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()

    def call(self, *command: str | Path, check: bool = True) -> str:
        done = subprocess.run(
            command, env=self.environment, cwd=self.folder, capture_output=True, text=True,
            timeout=60, check=False,
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{done.stdout}{done.stderr}\n{self.logs()}"
        return done.stdout

    def logs(self) -> str:
        return "\n".join(
            f"--- {p.name}\n{p.read_text()[-3000:]}" for p in sorted(self.folder.glob("*.out"))
        )
