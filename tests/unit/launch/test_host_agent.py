"""An agent where the launcher, the first host or the network lets it down."""

from __future__ import annotations

import io
import os
import signal
from typing import Any

import pytest
from helpers.ranks import free_port

from hvd_order.base.errors import InvalidUsage
from hvd_order.launch.jobs import host_agent, torch_agent
from hvd_order.launch.jobs.formations import Formation, FormationInbox, JobEnded, OnlyFormation


class Launcher(host_agent._Launcher):
    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []

    def send(self, what: str, **details: object) -> None:
        self.told.append((what, details))


def test_an_agent_that_cannot_serve_says_so_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_store(address: str) -> None:
        raise RuntimeError("no port is free")

    killed: list[int] = []
    monkeypatch.setattr(torch_agent, "serve_store", no_store)
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(number))
    launcher, inbox = Launcher(), FormationInbox(lambda *_: None)
    host_agent._listen(
        io.BytesIO(b'{"what": "serve", "formation": 1, "address": "127.0.0.1"}\n'), inbox, launcher
    )
    assert launcher.told == [("error", {"text": "nothing can be served here: no port is free"})]
    assert killed == [signal.SIGHUP]
    with pytest.raises(JobEnded):
        inbox.next_formation(0, None)


def test_an_agent_that_is_let_go_ends_in_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(number))
    inbox = FormationInbox(lambda *_: None)
    host_agent._listen(io.BytesIO(b'{"what": "leave"}\n'), inbox, Launcher())
    assert killed == []
    assert inbox.finished(), "nobody is waited for any more"


def test_a_host_whose_workers_end_while_the_job_forms_anew_takes_part() -> None:
    inbox = FormationInbox(lambda *_: None)
    first = Formation(1, 0, 1, 0, 1, 1, "127.0.0.1", 7)
    inbox.announce(first)
    assert inbox.next_formation(0, None) == first
    inbox.announce(Formation(2, 0, 2, 0, 1, 2, "127.0.0.1", 8))
    assert not inbox.finished()


class Newer(OnlyFormation):
    def newest(self) -> int:
        return 2


def test_a_first_host_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_agent, "_REACH_S", 0.3)
    nowhere = Formation(1, 1, 2, 1, 1, 2, "127.0.0.1", free_port())
    with pytest.raises(InvalidUsage, match=rf"at 127.0.0.1, port {nowhere.port} .*--network-inter"):
        torch_agent._Rendezvous(OnlyFormation(nowhere)).next_rendezvous()
    # The launcher has noticed that host's end as well, and a formation without it follows.
    torch_agent._Rendezvous(Newer(nowhere))._reach(nowhere)
