"""What a real cluster reads, keeps and writes down."""

from __future__ import annotations

import fcntl
import math
from pathlib import Path
from typing import Any

import pytest

from hvd_order.base.errors import InvalidUsage
from hvd_order.cluster.model.job import ClusterJob
from hvd_order.cluster.model.machines import Machines
from hvd_order.cluster.model.placement import JobPlacement
from hvd_order.cluster.model.speed import TableSpeed
from hvd_order.cluster.model.utility import Sigmoid
from hvd_order.cluster.policies.fifo import Fifo
from hvd_order.cluster.policies.interface import PolicyDecision
from hvd_order.cluster.serve.jobs_file import SLOT, ServedJob, read_jobs
from hvd_order.cluster.serve.journal import Journal, decision_of, noted
from hvd_order.cluster.serve.ledger import Ledger
from hvd_order.cluster.serve.processes import Processes
from hvd_order.cluster.serve.runner import Slots
from hvd_order.cluster.serve.status import ShownJob, write_status
from hvd_order.cluster.simulate.outcome import JobOutcome
from hvd_order.cluster.simulate.simulator import Rules, simulate
from hvd_order.tools.cli.main import main


def test_a_table_of_jobs_is_read(tmp_path: Path) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text(
        "name,command,workers,duration_s,samples,speed,most,value,slope,due_s\n"
        "one,python train.py --name 'a b',2,60,,,,,,\n"
        "two,python train.py,1,,500,1:10 2:19,4,3,0.1,20\n"
    )
    (_, one), (_, two) = read_jobs(path)
    assert one.command == ("python", "train.py", "--name", "a b")
    assert (one.job.requested, one.job.least, one.job.most) == (2, 1, 2)
    assert one.job.alone_s() == pytest.approx(60)
    assert two.job.alone_s() == pytest.approx(50)
    assert two.job.samples_per_s(JobPlacement.of([(0, 2, 0)])) == pytest.approx(19)
    assert two.job.utility == Sigmoid(3, 0.1, 20)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name,command,workers\na,x,1\n", "line 2: no duration_s"),
        ("name,command,workers,duration_s\na,,1,5\n", "line 2: job 'a' has no command"),
        ("name,command,workers,duration_s\na,x,1,5\n../b,x,1,5\n", "line 3: a job called"),
        ("name,command,workers,duration_s\na,x,one,5\n", "line 2: workers is 'one'"),
        ("name,command,workers,duration_s\na,x,1,5\na,y,1,5\n", "line 3: a second job 'a'"),
        ("name,command,workers,duration_s\na,x,1,5,7\n", "line 2: 5 fields; expected 4"),
        ("name,command,workers,hours\na,x,1,5\n", "unknown column 'hours'"),
        ("name,workers,duration_s\na,1,5\n", "has no column 'command'"),
    ],
)
def test_a_wrong_table_is_refused_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text(text)
    with pytest.raises(InvalidUsage, match=says):
        read_jobs(path)


def test_a_line_that_a_crash_cut_off_is_forgotten(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    placed = PolicyDecision(
        {"a": JobPlacement.of([(0, 2, 0), (1, 1, 0)], batch=8), "b": None}, ["c"], 7.5
    )
    journal.add("asked", 1.5, **noted(placed))
    with (tmp_path / "journal").open("a") as file:
        file.write('{"what": "asked", "at_')
    (line,) = journal.read()
    assert decision_of(line) == placed
    journal.add("closed", 2.0)
    assert [line["what"] for line in journal.read()] == ["asked", "closed"]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_text('{"what": "closed", "at_s": 1}\nnonsense\n')
    with pytest.raises(InvalidUsage, match="line 2 is damaged"):
        list(Journal(path).read())


def test_real_jobs_that_take_as_long_as_simulated_ones_have_the_same_outcomes() -> None:
    jobs = [
        ClusterJob(f"j{k}", 3.0 * k, 40.0 + 7 * k, TableSpeed({1: 1.0, 2: 1.8, 3: 2.5}),
            {SLOT: 1.0}, requested=1 + k % 3, most=3)
        for k in range(8)
    ]  # fmt: skip
    machines = Machines.alike(2, {SLOT: 2.0})
    simulated: list[JobOutcome] = []
    simulate(jobs, machines, Fifo(), Rules(start_s=2.0, resize_s=2.0), ended=simulated.append)
    ledger, policy = Ledger(machines, None, 2.0), Fifo()
    coming = list(jobs)
    while coming or ledger.waiting or ledger.running:
        ends = {n: s.since_s + s.left(s.since_s) / s.rate for n, s in ledger.running.items()}
        name = min(ends, key=lambda each: ends[each], default=None)
        end_s = math.inf if name is None else ends[name]
        now_s = min(end_s, coming[0].arrival_s if coming else math.inf)
        if name is not None and end_s == now_s:
            ledger.leave(name, now_s, ended=True)
        while coming and coming[0].arrival_s <= now_s:
            ledger.arrive(coming.pop(0), now_s)
        ledger.apply(policy.decide(ledger.view(now_s)), now_s)
    assert [o.name for o in ledger.outcomes] == [o.name for o in simulated]
    for real, other in zip(ledger.outcomes, simulated, strict=True):
        assert real.ended_s == pytest.approx(other.ended_s)
        assert real.started_s == pytest.approx(other.started_s)
        assert real.worker_s == pytest.approx(other.worker_s)
        assert real.fairness == pytest.approx(other.fairness)
        assert real.changes == other.changes


def test_an_impossible_decision_is_refused() -> None:
    ledger = Ledger(Machines.alike(1, {SLOT: 2.0}), None, 0.0)
    ledger.arrive(ClusterJob("a", 0.0, 10.0, TableSpeed({1: 1.0}), {SLOT: 1.0}, most=3), 0.0)
    with pytest.raises(InvalidUsage, match="more than machine 'm0' has"):
        ledger.apply(PolicyDecision({"a": JobPlacement.of([(0, 3, 0)])}), 1.0)
    with pytest.raises(InvalidUsage, match="'b', which is not in the cluster"):
        ledger.apply(PolicyDecision({"b": None}), 1.0)


def test_what_a_job_says_of_its_progress_replaces_the_estimate() -> None:
    ledger = Ledger(Machines.alike(1, {SLOT: 2.0}), None, 5.0)
    ledger.arrive(ClusterJob("a", 0.0, 100.0, TableSpeed({1: 1.0}), {SLOT: 1.0}), 0.0)
    ledger.apply(PolicyDecision({"a": JobPlacement.of([(0, 1, 0)])}), 0.0)
    state = ledger.state("a")
    assert state is not None
    assert state.done(25.0) == pytest.approx(20.0)
    ledger.progress("a", 12.0, 24.0)
    assert state.done(25.0) == pytest.approx(13.0)


class _RefusingRunner:
    """Starts nothing."""

    resizes = True

    def start(self, served: ServedJob, slots: Slots) -> None:
        raise OSError("no such host")


def test_a_job_that_is_cancelled_when_it_could_not_be_started_is_forgotten() -> None:
    job = ClusterJob("a", 0.0, 10.0, TableSpeed({1: 1.0}), {SLOT: 1.0})
    runner: Any = _RefusingRunner()
    processes = Processes(runner, {"m": 1}, 1.0, lambda name, text: None)
    processes.add(ServedJob(job, ("python",)))
    processes.want("a", {"m": 1})
    processes.adapt()
    processes.remove("a")
    assert processes.look() == []


def test_ctrl_c_ends_a_watch_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hvd_order.cluster.cli.cluster_status.time.sleep", interrupted)
    write_status(tmp_path, {"a": 2}, [ShownJob("one", "runs", {"a": 1}, 5.0, 0.5)])
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(["cluster", "serve", "--watch", "--state", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("slots in use: a 1 of 2\n")
