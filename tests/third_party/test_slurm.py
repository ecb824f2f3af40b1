"""examples/slurm under a real Slurm: daemons with a configuration of their own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from helpers.ranks import REPOSITORY, free_port

DAEMONS = ("munged", "slurmctld", "slurmd")
_missing = [name for name in DAEMONS if shutil.which(name, path="/usr/sbin:/usr/bin") is None]
pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(_missing), reason="needs Debian's packages slurm-wlm and munge"),
    pytest.mark.skipif(os.geteuid() != 0, reason="slurmd starts jobs as root only"),
]

TRAIN = """
import os, sys, time
import torch
import hvd_order.torch as hvd
from helpers.small_problem import alone, batches, equal, loss_of, new_model, weights_of

STEPS = 40
hvd.init()
model = new_model()
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters())
halfway = sys.argv[1]


@hvd.elastic.run
def train(state):
    print(f"rank {hvd.rank()} of {hvd.size()} begins at {state.step}", flush=True)
    while state.step < STEPS:
        rows, target = batches(STEPS, hvd.rank(), hvd.size())[state.step]
        optimizer.zero_grad()
        loss_of(model(rows), target).backward()
        optimizer.step()
        state.step += 1
        state.commit()
        if state.step == STEPS // 2 and not os.path.exists(halfway + ".go"):
            open(halfway, "w").close()
            while True:  # until the signal makes commit() end this run
                time.sleep(0.1)
                state.commit()


state = hvd.elastic.TorchState(model, optimizer, step=0)
train(state)
expected = alone(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), STEPS)
print("equal" if equal(weights_of(model), expected) else "DIFFERENT", hvd.rank(), flush=True)
hvd.shutdown()
"""


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


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    with ExitStack() as daemons:
        yield Slurm(tmp_path, daemons)


def test_a_preempted_job_goes_on_where_it_was(slurm: Slurm) -> None:
    script, halfway = slurm.folder / "train.py", slurm.folder / "halfway"
    script.write_text(TRAIN)
    output = slurm.folder / "job.out"
    job = slurm.call(
        "sbatch", "--parsable", "--nodes=1", f"--output={output}",
        REPOSITORY / "examples/slurm/train.sbatch", script, halfway,
    ).strip()  # fmt: skip
    wait_until(halfway.exists, 90, slurm.logs)
    Path(f"{halfway}.go").touch()
    slurm.call("scancel", "--batch", "--signal=TERM", job)  # as before the end of its time
    wait_until(lambda: "PENDING" in slurm.call("scontrol", "show", "job", job), 90, slurm.logs)
    # Slurm lets a job that was queued again wait for two minutes. In the second in which it ended,
    # slurmd would refuse it: "Job credential revoked".
    slurm.call("scontrol", "update", f"JobId={job}", "StartTime=now+10")
    wait_until(lambda: "begins at 20" in output.read_text(), 120, slurm.logs)
    wait_until(lambda: output.read_text().count("equal ") == 2, 90, slurm.logs)
    text = output.read_text()
    assert "rank 0 of 2 begins at 0" in text
    assert "DIFFERENT" not in text
    wait_until(lambda: "COMPLETED" in slurm.call("scontrol", "show", "job", job), 30, slurm.logs)
