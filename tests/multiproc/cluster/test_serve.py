"""A scheduler that runs elastic jobs for real, on two names of this host."""

from __future__ import annotations

import ast
import csv
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers.flags import wait_until
from helpers.launching import Job as Command
from helpers.launching import launcher_environment, no_process_with
from helpers.schemas import checked
from helpers.training import elastic_training

from hvd_order.cluster.model.machines import Machine, Machines
from hvd_order.cluster.model.placement import JobPlacement
from hvd_order.cluster.policies.interface import PolicyDecision, View
from hvd_order.cluster.serve.local import LocalRunner
from hvd_order.cluster.serve.scheduler import JobScheduler, ServeRules

BEGINS = r"rank (\d+) of (\d+) pid (\d+) begins at (\d+)$"
STEP = r"step (\d+) loss (\S+) at (\S+)$"


def serve(folder: Path, *options: str) -> list[str]:
    """The command line of a scheduler on two hosts with a slot each."""
    return [sys.executable, "-m", "hvd_order.tools.cli", "cluster", "serve", "--once",
            "-H", "localhost:1,127.0.0.1:1", "--state", str(folder / "state"), *options,
            str(folder / "jobs.csv")]  # fmt: skip


def write_jobs(folder: Path, *jobs: tuple[str, list[str], int]) -> None:
    """Writes a file of jobs: name, command, most workers."""
    with (folder / "jobs.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("name", "command", "workers", "duration_s", "most"))
        rows.writerows((name, shlex.join(command), 1, 60, most) for name, command, most in jobs)


def ask(folder: Path, *options: str) -> str:
    """What the command says beside a scheduler."""
    command = [*serve(folder)[:5], "--state", str(folder / "state"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.stdout + done.stderr


def train(steps: int, pace_s: float) -> list[str]:
    return [sys.executable, elastic_training.__file__, str(steps), str(pace_s)]


def log_of(folder: Path, name: str) -> str:
    return (folder / "state" / "jobs" / name / "log").read_text()


def found(pattern: str, text: str) -> list[re.Match[str]]:
    return list(re.finditer(pattern, text, re.MULTILINE))


def assert_trained_once(text: str, steps: int) -> None:
    """Each step once, with the losses and the weights of training without a break."""
    losses, weights = elastic_training.reference(steps)
    done = [(int(match[1]), float(match[2])) for match in found(STEP, text)]
    assert [step for step, _ in done] == list(range(steps)), text
    assert [loss for _, loss in done] == pytest.approx(losses, rel=1e-9)
    (ended,) = found(r"weights (.*)$", text)
    assert ast.literal_eval(ended[1]) == pytest.approx(weights, rel=1e-9)


@pytest.mark.timeout(300)
def test_jobs_take_turns_and_one_that_fails_or_is_cancelled_is_reported(tmp_path: Path) -> None:
    write_jobs(
        tmp_path,
        ("long", train(100_000, 0.05), 1),
        ("first", train(40, 0.0), 1),
        ("second", train(40, 0.0), 1),
        ("broken", ["no-such-command"], 1),
    )
    with Command(serve(tmp_path, "--restarts", "1"), launcher_environment()) as scheduler:
        scheduler.wait_for("first: has completed")
        assert re.search(r"^long +runs ", ask(tmp_path, "--status"), re.MULTILINE)
        assert "did you mean 'long'?" in ask(tmp_path, "--cancel", "lung")
        assert ask(tmp_path, "--cancel", "long") == "long stops at its next commit\n"
        assert "slots in use: localhost 0 of 1" in ask(tmp_path, "--watch")  # until all have ended
        assert scheduler.wait(240) == 1, scheduler.text()
    told = scheduler.text()
    begun = found(r"(\w+): is started on", told)
    assert [match[1] for match in begun] == ["long", "first", "second", "broken", "broken"]
    assert re.findall(r"long: (.*)", told)[-3:] == [
        "cancelled", "is asked to stop at its next commit", "has ended"
    ]  # fmt: skip
    completed = scheduler.matches(r"(first|second): has completed")
    assert {match[1] for match in completed} == {"first", "second"}
    assert told.index("broken: is started") > told.index(": has completed"), "no slot was free"
    again, given_up = told.split("broken: failed")[1:]
    assert again.startswith(" (exit code 2) and is started again")
    assert given_up.startswith(" 2 times, at last by exit code 2")
    assert "there is no command 'no-such-command'" in given_up
    for name in ("first", "second"):
        assert_trained_once(log_of(tmp_path, name), 40)
    with (tmp_path / "state" / "outcomes.csv").open() as file:
        outcomes = {row["job"]: row for row in csv.DictReader(file)}
    assert outcomes["broken"]["ended_s"] == ""
    assert 0 < float(outcomes["first"]["completion_s"]) == float(outcomes["first"]["ended_s"])
    status = checked(ask(tmp_path, "--status", "--json"), "cluster_serve")
    states = {job["name"]: job["state"] for job in status["jobs"]}
    assert states == {
        "long": "cancelled",
        "first": "completed",
        "second": "completed",
        "broken": "failed",
    }


class Scripted:
    """Gives a job another number of workers each time that its log has the next cue."""

    def __init__(self, folder: Path, script: Sequence[tuple[str, int]]) -> None:
        self.log = folder / "state" / "jobs" / "job" / "log"
        self.script = list(script)

    def decide(self, view: View) -> PolicyDecision:
        decision = PolicyDecision(wake_s=view.now_s + 0.1)
        for name in (*view.waiting, *view.running):
            if self.script and self.script[0][0] in (
                self.log.read_text() if self.log.exists() else ""
            ):
                _, size = self.script.pop(0)
                parts = [(machine, 1, 0) for machine in range(size)]
                decision.place[name] = JobPlacement.of(parts) if size else None
        return decision


@pytest.mark.timeout(300)
def test_a_job_grows_shrinks_stops_and_goes_on_at_its_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in launcher_environment().items():
        monkeypatch.setenv(name, value)
    # At step 20 it waits until it has two ranks, and so on; at 60 it is stopped in between.
    write_jobs(tmp_path, ("job", [*train(80, 0.0), "20:2", "40:1", "60:2"], 2))
    machines = Machines([Machine(name, {"slot": 1}) for name in ("localhost", "127.0.0.1")])
    state = tmp_path / "state"
    policy = Scripted(tmp_path, [("", 1), ("waits at 20", 2), ("waits at 40", 1),
                                 ("waits at 60", 0), ("waits at 60", 2)])  # fmt: skip
    scheduler = JobScheduler(
        state, tmp_path / "jobs.csv", machines, policy, LocalRunner(state / "jobs", 60),
        ServeRules(resize_s=0.0, once=True),
    )  # fmt: skip
    assert scheduler.run(threading.Event(), threading.Event()) == 0
    assert policy.script == []
    told = capsys.readouterr().out
    assert told.index("is asked to stop") < told.index("has stopped") < told.rindex("is started")
    text = log_of(tmp_path, "job")
    assert_trained_once(text, 80)
    starts = sorted((int(m[4]), int(m[2]), int(m[1])) for m in found(BEGINS, text))
    assert starts == [(0, 1, 0), (20, 2, 0), (20, 2, 1), (40, 1, 0), (60, 2, 0), (60, 2, 1)]
    formed = json.loads((state / "jobs" / "job" / "formation").read_text())
    assert formed["devices"] == {"localhost": [0], "127.0.0.1": [0]}
    assert formed["began"] is True


@pytest.mark.timeout(300)
def test_jobs_outlive_their_scheduler_and_are_found_again(tmp_path: Path) -> None:
    write_jobs(tmp_path, ("job", train(60, 0.15), 1))
    environment = launcher_environment()
    with Command(serve(tmp_path), environment) as killed:
        killed.wait_for("job: is started")
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
    folder = tmp_path / "state" / "jobs" / "job"
    with Command(serve(tmp_path), environment) as second:
        wait_for_step(folder / "log", 5)
        keeper = (folder / "pid").read_text()
        second.signal(signal.SIGTERM)
        assert second.wait() == 0, second.text()
    assert not second.matches("is started"), "the job ran all the time"
    assert no_process_with(str(folder)), "the job was stopped"
    before = len(found(STEP, log_of(tmp_path, "job")))
    assert 5 <= before < 60
    assert before % elastic_training.COMMIT_EVERY == 0, "it ended at a commit"
    with Command(serve(tmp_path), environment) as third:
        assert third.wait() == 0, third.text()
    assert third.matches("job: is started")
    assert (folder / "pid").read_text() != keeper
    text = log_of(tmp_path, "job")
    assert [int(match[4]) for match in found(BEGINS, text)] == [0, before]
    assert_trained_once(text, 60)
    events = [json.loads(line)["what"] for line in (tmp_path / "state" / "journal").open()]
    assert events == ["begun", "arrived", "asked", "closed", "completed", "closed"]


def wait_for_step(log: Path, step: int) -> None:
    def text() -> str:
        return log.read_text() if log.exists() else ""

    wait_until(lambda: found(rf"step {step} loss", text()), text, 100)
