"""What the launcher decides, with agents that answer from a script instead of starting anything."""

from __future__ import annotations

import os
import queue
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hvd_order.launch.hosts import Host
from hvd_order.launch.jobs import driver as module
from hvd_order.launch.jobs.driver import Driver, explain
from hvd_order.launch.jobs.formation_file import read_formation
from hvd_order.launch.jobs.formations import WorkerFailure
from hvd_order.launch.request import ElasticRules, LaunchRequest

Message = dict[str, Any]


class Agents:
    """Makes agents; `play` says what one answers to a formation, and may change between two."""

    def __init__(self, play: Callable[[str, Message], list[Message]]) -> None:
        self.play = play
        # By number: host, place, processes.
        self.formations: dict[int, list[tuple[str, int, int]]] = {}
        self.ranks: list[tuple[str, int, int]] = []  # host, first rank, size
        self.told: list[tuple[str, str]] = []
        self.silent: set[str] = set()
        self.lost_on_serve: list[str] = []
        self.impatient = False  # Ctrl-C while the launcher waits for their ends
        self.running: dict[str, Agent] = {}

    def __call__(
        self, host: str, count: int, request: object, events: queue.Queue[Any], prefix: str
    ) -> Agent:
        return Agent(self, host, events)


class Agent:
    def __init__(self, agents: Agents, host: str, events: queue.Queue[Any]) -> None:
        self.host, self.remote, self.last_errors = host, True, ["ssh: no answer"]
        self._agents, self._events = agents, events
        agents.running[host] = self
        if host not in agents.silent:
            self._say(what="ready", address=f"address of {host}", launcher=None)

    def send(self, message: Message) -> None:
        self._agents.told.append((self.host, message["what"]))
        if message["what"] == "serve":
            for host in self._agents.lost_on_serve:
                self._agents.running[host]._say(what="ended", code=255)
            self._say(what="serving", formation=message["formation"], port=7)
        elif message["what"] == "formation":
            now = message["formation"]
            seen = self._agents.formations.setdefault(now["number"], [])
            seen.append((self.host, now["place"], now["process_count"]))
            self._agents.ranks.append((self.host, now["first_rank"], now["size"]))
            self._say(what="began", formation=now["number"])
            for answer in self._agents.play(self.host, now):
                self._say(**answer)

    def _say(self, **message: Any) -> None:
        self._events.put((self, message))

    def stop(self) -> None:
        self._agents.told.append((self.host, "stop"))

    def wait(self, seconds: float) -> None:
        if self._agents.impatient:
            self._agents.impatient = False
            raise KeyboardInterrupt

    def leave(self) -> None:
        self._agents.told.append((self.host, "leave"))

    def kill(self) -> None:
        self._agents.told.append((self.host, "kill"))


def succeed(host: str, now: Message) -> list[Message]:
    return [{"what": "finished", "formation": now["number"]}]


class Job:
    """Runs the launcher with agents in place of its own; gives its exit code."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._patch, self._capsys = monkeypatch, capsys
        monkeypatch.setattr(module, "_TICK_S", 0.01)

    def __call__(
        self, agents: Agents, count: int, hosts: list[Host], rules: ElasticRules | None = None,
        start_timeout_s: float = 30.0,
    ) -> int:  # fmt: skip
        self._patch.setattr(module, "AgentProcess", agents)
        request = LaunchRequest(
            ["x"], count, hosts=hosts, elastic=rules, start_timeout_s=start_timeout_s
        )
        return Driver(request).run()

    def errors(self) -> str:
        return self._capsys.readouterr().err


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Job:
    return Job(monkeypatch, capsys)


def failed(now: Message, rank: int = 0, code: int = 9, commit: int = 0) -> Message:
    what = {"rank": rank, "code": code, "commit": commit}
    return {"what": "failed", "formation": now["number"], **what}


A, B, C = Host("a", 2), Host("b", 2), Host("c", 2)


def test_ranks_follow_the_order_of_the_hosts(job: Job) -> None:
    agents = Agents(succeed)
    assert job(agents, 3, [B, A, C]) == 0
    assert agents.formations == {1: [("b", 0, 2), ("a", 1, 1)]}
    assert agents.ranks == [("b", 0, 3), ("a", 2, 3)]
    leave = agents.told.index(("b", "leave"))
    assert agents.told[leave:] == [("b", "leave"), ("a", "leave"), ("b", "stop"), ("a", "stop")]


def test_a_fixed_job_ends_with_its_first_failure(job: Job) -> None:
    agents = Agents(lambda host, now: [failed(now, 2, -9)] if host == "b" else [])
    assert job(agents, 4, [A, B]) == 128 + 9
    error = job.errors()
    assert error == "hvd-order: rank 2 on b was ended by SIGKILL; all others were stopped\n"
    assert agents.told[-2:] == [("a", "stop"), ("b", "stop")]


def test_whoever_asks_twice_is_not_kept_waiting(job: Job) -> None:
    agents = Agents(lambda host, now: [failed(now)] if host == "b" else [])
    agents.impatient = True
    assert job(agents, 4, [A, B]) == 9
    assert agents.told[-2:] == [("a", "kill"), ("b", "kill")]


def test_a_silent_host_is_named(job: Job) -> None:
    agents = Agents(succeed)
    agents.silent = {"b"}
    assert job(agents, 4, [A, B], start_timeout_s=0.1) == 1
    assert "b did not answer in time: ssh: no answer" in job.errors()
    assert agents.formations == {}


def test_failures_with_progress_in_between_do_not_add_up(job: Job) -> None:
    def play(host: str, now: Message) -> list[Message]:
        if now["number"] == 8:
            return succeed(host, now)
        return [failed(now, commit=now["number"])] if host == "a" else []

    agents = Agents(play)
    assert job(agents, 4, [A, B], ElasticRules(min_count=2)) == 0
    assert sorted(agents.formations) == list(range(1, 9))


@pytest.mark.parametrize("limit", [0, 1])
def test_the_reset_limit_counts_what_follows_the_first_formation(job: Job, limit: int) -> None:
    agents = Agents(lambda host, now: [failed(now)] if host == "a" else [])
    assert job(agents, 4, [A, B], ElasticRules(min_count=2, reset_limit=limit)) == 9
    assert sorted(agents.formations) == list(range(1, 2 + limit))
    assert f"has formed anew {limit} times, the --reset-limit" in job.errors()


def test_a_host_that_only_fails_is_left_out(job: Job) -> None:
    def play(host: str, now: Message) -> list[Message]:
        if now["host_count"] == 1:
            return succeed(host, now)
        return [failed(now)] if host == "a" else []

    agents = Agents(play)
    assert job(agents, 4, [A, B], ElasticRules(min_count=2)) == 0
    assert agents.formations[4] == [("b", 0, 2)]
    assert "3 times in a row without a new commit" in job.errors()


def test_a_lost_host_comes_back_after_its_cooldown(job: Job) -> None:
    def play(host: str, now: Message) -> list[Message]:
        if now["number"] == 1 and host == "b":
            return [{"what": "ended", "code": 255}]
        return succeed(host, now) if now["number"] == 3 else []

    agents = Agents(play)
    rules = ElasticRules(min_count=2, cooldown_s=0.1)
    assert job(agents, 4, [A, B], rules) == 0
    assert agents.formations[2] == [("a", 0, 2)]
    assert agents.formations[3] == [("a", 0, 2), ("b", 1, 2)]


def test_a_host_lost_before_the_round_is_announced(job: Job) -> None:
    agents = Agents(succeed)
    agents.lost_on_serve = ["b"]
    rules = ElasticRules(min_count=4, cooldown_s=99.0, timeout_s=0.1)
    assert job(agents, 4, [A, B], rules) == 1
    assert "there were no hosts for 4 processes within 0.1 s" in job.errors()
    assert agents.formations == {}


def test_too_few_hosts_end_the_job_after_the_timeout(job: Job) -> None:
    def play(host: str, now: Message) -> list[Message]:
        return [{"what": "ended", "code": 255}] if host == "b" else []

    agents = Agents(play)
    rules = ElasticRules(min_count=3, cooldown_s=99.0, timeout_s=0.1)
    assert job(agents, 4, [A, B], rules) == 1
    assert "there were no hosts for 3 processes within 0.1 s" in job.errors()


def test_a_failure_after_others_have_finished_ends_the_job(job: Job) -> None:
    def play(host: str, now: Message) -> list[Message]:
        if host == "b":
            return [failed(now, 3, 5)]
        return [{"what": "finished", "formation": now["number"]}]

    assert job(Agents(play), 4, [A, B], ElasticRules(min_count=2)) == 5
    assert "after others had finished; ending the job" in job.errors()


def test_hosts_that_are_left_out_for_good_are_not_waited_for(job: Job) -> None:
    def play(host: str, now: Message) -> list[Message]:
        lost = {1: "b", 2: "c", 3: "a"}[now["number"]]
        return [{"what": "ended", "code": 255}] if host == lost else []

    agents = Agents(play)
    assert job(agents, 6, [A, B, C], ElasticRules(min_count=2, timeout_s=5.0)) == 1
    error = job.errors()
    assert error.endswith("all others were stopped\n")
    assert "waiting for more" not in error


def test_a_host_that_ends_before_the_others_have_finished_is_lost(job: Job) -> None:
    def play(host: str, now: Message) -> list[Message]:
        ended = {"what": "ended", "code": 255}
        return [{"what": "finished", "formation": 1}, ended] if host == "a" else []

    assert job(Agents(play), 4, [A, B]) == 1
    assert "the connection to a broke, or its agent died" in job.errors()


def test_failures_are_explained() -> None:
    together = WorkerFailure(1, 3, [(rank, 1) for rank in (0, 2, 3, 4)])
    assert explain(together, " on a") == (
        "rank 1 on a failed with exit code 3, rank 0 on a failed with exit code 1, "
        "rank 2 on a failed with exit code 1, rank 3 on a failed with exit code 1 and 1 more"
    )
    assert explain(WorkerFailure(3, -9)) == "rank 3 was ended by SIGKILL"
    assert explain(WorkerFailure(3, -40)) == "rank 3 was ended by signal 40"


def test_sigterm_lets_a_job_that_keeps_its_commits_reach_the_next_one(
    job: Job, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def end(host: str, now: Message) -> list[Message]:
        os.kill(os.getpid(), signal.SIGTERM)
        return []

    for directory, order in ((tmp_path, "leave"), (None, "stop")):
        if directory is None:
            monkeypatch.delenv("HVD_ORDER_ELASTIC_DIR")
        else:
            monkeypatch.setenv("HVD_ORDER_ELASTIC_DIR", str(directory))
        agents = Agents(end)
        assert job(agents, 2, [A], ElasticRules(1)) == 128 + signal.SIGTERM
        assert agents.told[-1] == ("a", order)


def test_a_file_says_what_the_job_uses(job: Job, tmp_path: Path) -> None:
    path = tmp_path / "formation"
    seen = []

    def look(host: str, now: Message) -> list[Message]:
        seen.append(read_formation(path))
        return [{"what": "began", "formation": now["number"]}, *succeed(host, now)]

    rules = ElasticRules(1, formation_file=path)
    assert job(Agents(look), 3, [Host("a", 2, (0, 3)), B], rules) == 0
    assert seen[-1] is None or not seen[-1].began
    formed = read_formation(path)
    assert formed is not None
    assert formed.slots == {"a": 2, "b": 1} or formed.slots == {"a": 2, "b": 2}
    assert formed.devices == {"a": [0, 3]}
    assert formed.leaving == []
    assert formed.began
