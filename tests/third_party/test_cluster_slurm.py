"""A scheduler that submits its jobs to a real Slurm."""

from __future__ import annotations

import ast
import re
import shlex
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from helpers.environments.slurm_cluster import NEEDS_SLURM, Slurm, wait_until
from helpers.training import elastic_training

from hvd_order.cluster.model.machines import Machine, Machines
from hvd_order.cluster.model.placement import JobPlacement
from hvd_order.cluster.policies.interface import PolicyDecision, View
from hvd_order.cluster.serve.scheduler import JobScheduler, ServeRules
from hvd_order.cluster.serve.slurm import SlurmRunner

pytestmark = NEEDS_SLURM


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    with ExitStack() as daemons:
        yield Slurm(tmp_path, daemons)


class GrowsOnce:
    """Gives all to the first job: one worker, and two when its log has a cue."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def decide(self, view: View) -> PolicyDecision:
        decision = PolicyDecision(wake_s=view.now_s + 0.5)
        for name in (*view.running, *view.waiting)[:1]:
            grown = self.log.exists() and "waits at 20" in self.log.read_text()
            decision.place[name] = JobPlacement.of([(0, 2 if grown else 1, 0)])
        return decision


def test_a_job_changes_at_a_commit_and_a_wrong_one_is_reported(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in slurm.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    jobs, log = slurm.folder / "jobs.csv", slurm.folder / "state" / "jobs" / "job" / "log"
    train = [sys.executable, elastic_training.__file__, "40", "0", "20:2"]
    jobs.write_text(f"name,command,workers,duration_s,most\njob,{shlex.join(train)},1,40,2\n")
    machines = Machines([Machine(socket.gethostname(), {"slot": 2})])
    state = slurm.folder / "state"
    scheduler = JobScheduler(
        state, jobs, machines, GrowsOnce(log), SlurmRunner(state / "jobs"),
        ServeRules(resize_s=0.0, once=True, restarts=0),
    )  # fmt: skip
    stop, at_once = threading.Event(), threading.Event()
    codes: list[int] = []
    running = threading.Thread(target=lambda: codes.append(scheduler.run(stop, at_once)))
    running.start()
    try:
        wait_until(lambda: log.exists() and "waits at 20" in log.read_text(), 90, slurm.logs)
        with jobs.open("a") as file:
            file.write("wrong,no-such-command,1,1,1\n")
        running.join(240)
        assert not running.is_alive(), slurm.logs() + log.read_text()
    finally:
        stop.set()
        at_once.set()
        running.join(60)
    assert codes == [1]
    told, text = capsys.readouterr().out, log.read_text()
    assert re.search(r"wrong: failed 1 times, at last by exit code \d+", told)
    assert told.index("is asked to stop") < told.index("has stopped") < told.rindex("is started")
    starts = sorted(re.findall(r"rank (\d+) of (\d+) pid \d+ begins at (\d+)", text))
    assert starts == [("0", "1", "0"), ("0", "2", "20"), ("1", "2", "20")]
    steps = [int(step) for step in re.findall(r"step (\d+) loss", text)]
    assert steps == list(range(40))
    weights = re.search(r"weights (.*)$", text, re.MULTILINE)
    assert weights is not None
    assert ast.literal_eval(weights[1]) == pytest.approx(elastic_training.reference(40)[1])
    assert slurm.call("squeue", "-h") == "", "no batch job is left"
